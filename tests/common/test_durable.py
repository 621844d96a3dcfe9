"""Files that are hashed while they are written: what a manifest says of them, and what the disk said."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from tests.helpers.failing_disks import library, start
from torchtune_adaptive.common import durable, saving_through

BYTES = torch.arange(48, dtype=torch.uint8)
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
]
OF_EACH_TYPE = {
    **{f"of {dtype}": BYTES.clone().view(dtype).reshape(2, -1) for dtype in DTYPES},
    "of bits": BYTES.reshape(3, 16) % 2 == 0,
}
TENSORS: dict[str, tuple[dict[str, torch.Tensor], dict[str, str] | None]] = {
    "of one type": (
        {"b": torch.rand(3, 5), "a": torch.rand(7), "0": torch.tensor(1.5)},
        {"format": "pt"},
    ),
    "of all types": (OF_EACH_TYPE, {"format": "pt"}),
    "none": ({}, None),
    "empty ones": ({"none": torch.empty(0), "a": torch.rand(2), "rows": torch.empty(3, 0)}, None),
    "odd names": ({'ü "\n\\/\x7f\u2028': torch.rand(3)}, {'ü "\n': "\x01"}),
    "bfloat16, of no even number of bytes before": (
        {"bits": torch.tensor([True]), "b": torch.rand(3).bfloat16(), "c": torch.rand(1)},
        None,
    ),
}


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


@pytest.mark.parametrize("name", TENSORS)
def test_safetensors_reads_what_is_written_in_its_format(name: str, tmp_path: Path) -> None:
    tensors, metadata = TENSORS[name]
    path, writer = tmp_path / "file.safetensors", durable.Writer()
    with saving_through(writer.create):
        save_file(tensors, path, metadata=metadata)
    assert [path.name] == [*writer.files(tmp_path)], "and nothing but this has written it"
    with safe_open(path, framework="pt") as read:
        assert read.metadata() == metadata
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for each, tensor in tensors.items():
        assert (found[each].dtype, found[each].shape) == (tensor.dtype, tensor.shape)
        assert as_bytes(found[each]) == as_bytes(tensor)
    theirs, ours = save(tensors, metadata), path.read_bytes()
    assert len(ours) == len(theirs)
    if len({tensor.dtype for tensor in tensors.values()}) <= 1 and name != "empty ones":
        assert ours == theirs, "they order others by their types, which have no order that is told"


def test_each_tensor_begins_where_its_elements_may(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    with saving_through(durable.Writer().create):
        save_file(
            {each: tensor[:1, :1].contiguous() for each, tensor in OF_EACH_TYPE.items()}, path
        )
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    for name, tensor in OF_EACH_TYPE.items():
        at = begin + header[name]["data_offsets"][0]
        assert at % tensor.element_size() == 0, name


def test_what_safetensors_refuses_is_refused(tmp_path: Path) -> None:
    one = torch.rand(4, 4)
    with saving_through(durable.Writer().create):
        with pytest.raises(RuntimeError, match="share memory"):
            save_file({"a": one, "b": one}, tmp_path / "file")
        with pytest.raises(ValueError, match="non contiguous"):
            save_file({"a": one.T}, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_what_torch_saves_is_what_it_loads(tmp_path: Path) -> None:
    state = {"weights": torch.rand(1000), "same": None, "step": 3}
    state["same"] = state["weights"]
    path, writer = tmp_path / "state.pt", durable.Writer()
    with saving_through(writer.create):
        torch.save(state, path)
        torch.save(state, f"{path}.old", _use_new_zipfile_serialization=False)
        with (tmp_path / "opened").open("wb") as file:
            torch.save(state, file)
    assert writer.files(tmp_path).keys() == {"state.pt", "state.pt.old"}
    for name in ("state.pt", "state.pt.old"):
        found = torch.load(tmp_path / name, weights_only=True)
        assert torch.equal(found["weights"], state["weights"])
        assert found["same"].data_ptr() == found["weights"].data_ptr()
    mapped = torch.load(path, weights_only=True, mmap=True)
    assert torch.equal(mapped["weights"], state["weights"])


def write(path: Path, content: bytes) -> durable.Writer:
    writer = durable.Writer()
    with writer.create(path) as file:
        file.write(content[:3])
        file.write(content[3:])
    return writer


def test_a_manifest_says_what_was_written_and_not_what_is_there(tmp_path: Path) -> None:
    """As where the disk has lost something without a word: it is found when the file is read."""
    content = os.urandom(3 << 20)
    folder = tmp_path / "sealed"
    folder.mkdir()
    writer = write(tmp_path / "written", content)
    named = (tmp_path / "written").rename(folder / "renamed")
    written = named.stat().st_mtime_ns
    with named.open("r+b") as file:
        file.write(bytes(1000))
    os.utime(named, ns=(written, written))
    durable.seal(folder, {}, writer.files(folder))
    manifest = durable.read_manifest(folder)
    assert manifest.files["renamed"][0] == len(content)
    with pytest.raises(durable.Damaged, match=r"renamed is corrupted"):
        durable.check_contents(folder, manifest, ["renamed"])
    named.write_bytes(content)
    durable.check_contents(folder, manifest, ["renamed"])
    assert writer.files(folder) == {}, "another one has written it"


CLOSED = """
import os, sys
import torch
from pathlib import Path
from safetensors.torch import save_file
from torchtune_adaptive.common import durable, saving_through
path, many = Path(sys.stdin.read()), {"weights": torch.ones(100_000)}
for operation in ("lost", "close", "fsync", "write", "open"):
    for save in (lambda: torch.save(many, path), lambda: save_file(many, path)):
        os.environ["FAILS_AT"] = operation
        try:
            with saving_through(durable.Writer().create):
                save()
        except OSError as error:
            print(operation, error.errno, error.filename == str(path))
"""


def test_each_error_of_the_disk_is_raised_as_it_is(tmp_path: Path) -> None:
    """Those that are only told when a file is closed, too: what is lost then is not known otherwise."""
    path = tmp_path / "file"
    fails = {"FAILS_FOR": str(path), "FAILS_WITH": str(errno.EDQUOT)}
    said = start(CLOSED, library(tmp_path), str(path), **fails)
    operations = ("lost", "close", "fsync", "write", "open")
    assert said.splitlines() == [f"{each} {errno.EDQUOT} True" for each in operations for _ in "12"]


def test_an_error_waits_until_the_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Any] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    file = durable.HashedFile(tmp_path / "no folder" / "file")
    assert (file.write(b"content"), file.tell()) == (7, 7)
    with pytest.raises(FileNotFoundError, match="no folder"):
        file.close()
    file.close()  # it has been said
    full = durable.HashedFile(Path("/dev/full"))
    full.write(b"content")
    full.write(b"and more")
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        full.close()
    assert not flushed, "what is not whole"
