"""Row lengths are looked up once, and cached as long as they are true."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from omegaconf import OmegaConf

from tests.helpers.ranks import Alone, run_ranks
from torchtune_adaptive.common.cache import Cache
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.recipe.data.length_files import longest_known
from torchtune_adaptive.recipe.data.row_lengths import RowLengths


class Rows(list[dict[str, list[int]]]):
    """Counts how often a row is looked at."""

    looked = 0

    def __getitem__(self, index: Any) -> Any:
        self.looked += 1
        return super().__getitem__(index)


def dataset(lengths: list[int]) -> Rows:
    return Rows({"tokens": list(range(length))} for length in lengths)


CFG = OmegaConf.create({"dataset": {"source": "a"}, "tokenizer": {"path": "b"}})


def look(rows: Rows, folder: Path, cfg: Any = CFG) -> list[int]:
    return RowLengths(rows, cfg, Alone(), str(folder)).all(say_progress=False).tolist()


def test_they_are_cached(tmp_path: Path) -> None:
    lengths = [n % 7 + 1 for n in range(1000)]
    first, second = dataset(lengths), dataset(lengths)
    assert look(first, tmp_path) == lengths and first.looked == 1000
    assert look(second, tmp_path) == lengths and second.looked < 100


def test_another_tokenizer_is_another_matter(tmp_path: Path) -> None:
    look(dataset([3, 4]), tmp_path)
    other = OmegaConf.create({**CFG, "tokenizer": {"path": "c"}})
    assert look(dataset([5, 6]), tmp_path, other) == [5, 6]


@pytest.mark.parametrize("several", [False, True], ids=["a dataset", "a list of datasets"])
def test_a_dataset_may_refer_to_the_rest_of_the_config(tmp_path: Path, several: bool) -> None:
    def cfg(assets: str) -> Any:
        one = {"source": "${assets}/data.json"}
        dataset = [one] if several else one
        return OmegaConf.create({**CFG, "assets": assets, "dataset": dataset})

    assert look(dataset([3, 4]), tmp_path, cfg("here")) == [3, 4]
    assert look(dataset([5, 6]), tmp_path, cfg("there")) == [5, 6]


def test_what_is_stale_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    look(dataset([3, 4, 5]), tmp_path)
    with caplog.at_level("WARNING"):
        assert look(dataset([3, 4, 6]), tmp_path) == [3, 4, 6]
    assert "row 2 had 5 tokens and now has 6" in caplog.text
    assert look(dataset([3, 4, 6]), tmp_path) == [3, 4, 6]


@pytest.mark.parametrize("spoilt", [b"", b"nonsense", b'{"value": [3, 5], "facts": {}}'])
@pytest.mark.parametrize("ending", ["json", "npy"])
def test_what_is_spoilt_is_looked_up_again(
    tmp_path: Path, spoilt: bytes, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    look(dataset([3, 4]), tmp_path)
    (path,) = tmp_path.rglob(f"*.{ending}")
    whole = path.read_bytes()
    path.write_bytes(spoilt)
    with caplog.at_level("WARNING"):
        assert look(dataset([3, 4]), tmp_path) == [3, 4]
    assert f"Ignoring cached row lengths in {path}" in caplog.text
    assert path.read_bytes() == whole
    assert_used(tmp_path, [3, 4])


def assert_used(folder: Path, lengths: list[int]) -> None:
    """The cached lengths are used: rows are looked at to check them, and no more."""
    rows = dataset(lengths)
    cached = RowLengths(rows, CFG, Alone(), str(folder)).known()
    assert isinstance(cached, np.memmap) and cached.tolist() == lengths


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda whole: whole[:-1],
    "cut before the lengths": lambda whole: whole[:100],
    "another number": lambda whole: whole[:-4] + b"\5\0\0\0",
    "another type": lambda whole: whole.replace(b"<i4", b"<f4"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_of_lengths_is_made_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = [n % 7 + 1 for n in range(1000)]
    look(dataset(lengths), tmp_path)
    (path,) = tmp_path.rglob("*.npy")
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    rows = dataset(lengths)
    with caplog.at_level("WARNING"):
        assert look(rows, tmp_path) == lengths and rows.looked >= 1000
    assert f"Ignoring cached row lengths in {path}" in caplog.text
    assert "is missing or damaged; recomputing" in caplog.text
    assert_used(tmp_path, lengths)


def test_a_missing_file_of_lengths_is_made_again(tmp_path: Path) -> None:
    look(dataset([3, 4]), tmp_path)
    (path,) = tmp_path.rglob("*.npy")
    path.unlink()
    assert look(dataset([3, 4]), tmp_path) == [3, 4] and path.exists()


def test_lengths_that_an_earlier_version_cached_are_read(tmp_path: Path) -> None:
    rows = dataset([3, 4])
    look(rows, tmp_path)
    (path,), (array,) = tmp_path.rglob("*.json"), tmp_path.rglob("*.npy")
    array.unlink()
    facts = json.loads(path.read_text())["facts"]
    cache: Cache[list[int]] = Cache(path.parent, "row lengths", lambda value: True)
    cache.put(facts, [3, 4])
    assert longest_known(CFG, str(tmp_path)) == 4
    assert_used(tmp_path, [3, 4])
    assert array.exists(), "and kept as they are now"


def test_the_longest_row_is_known_without_opening_the_lengths(tmp_path: Path) -> None:
    assert longest_known(CFG, str(tmp_path)) is None
    look(dataset([3, 9, 4]), tmp_path)
    for array in tmp_path.rglob("*.npy"):
        array.unlink()
    assert longest_known(CFG, str(tmp_path)) == 9


def test_a_folder_that_cannot_be_written_costs_the_cache_only(tmp_path: Path) -> None:
    (tmp_path / "row_lengths").write_text("no folder")
    assert look(dataset([3, 4]), tmp_path) == [3, 4]


def shared_lengths(folder: Path, cache: str) -> tuple[str, list[int], int]:
    """What a rank has, whose machine has a cache of its own."""
    os.environ["LOCAL_RANK"] = "0" if "{}" in cache else f"{dist.get_rank()}"
    ranks = Ranks(timeout=60)
    at = str(folder / cache.format(ranks.rank)) if cache else False
    rows = dataset([5, 3, 8, 1, 9, 2, 7])
    lengths = RowLengths(rows, CFG, ranks, at).all(say_progress=False)
    ranks.close()
    return type(lengths).__name__, lengths.tolist(), rows.looked


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cache", "kinds"),
    [
        ("shared", ["memmap"] * 3),
        ("of_{}", ["memmap", "memmap", "memmap"]),
        ("", ["ndarray"] * 3),
    ],
    ids=["one machine", "a machine each", "no cache"],
)
def test_every_rank_has_them_and_the_ranks_of_a_machine_share_a_file(
    tmp_path: Path, cache: str, kinds: list[str]
) -> None:
    found = run_ranks(shared_lengths, 3, tmp_path, cache)
    assert [kind for kind, *_ in found] == kinds
    assert all(lengths == [5, 3, 8, 1, 9, 2, 7] for _, lengths, _ in found)
    assert sum(looked for *_, looked in found) == 7
    assert len([*tmp_path.rglob("*.npy")]) == {"shared": 1, "of_{}": 3, "": 0}[cache]


def test_nothing_is_cached_where_the_cache_is_off(tmp_path: Path) -> None:
    rows = dataset([3, 4])
    assert RowLengths(rows, CFG, Alone(), False).all(say_progress=False).tolist() == [3, 4]
