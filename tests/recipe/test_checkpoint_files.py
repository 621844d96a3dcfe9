"""Checkpoints as files: complete or absent whenever the process is killed, and damage that is found."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers.killing import (
    Copies,
    Fault,
    in_child,
    record_operations,
    what_power_may_take,
)
from tests.helpers.ranks import Alone
from torchtune_adaptive.common import durable
from torchtune_adaptive.common.durable import MANIFEST
from torchtune_adaptive.common.errors import CheckpointError
from torchtune_adaptive.recipe.checkpoints.folder import (
    STATE,
    CheckpointFolder,
    last_saved,
    take_output_folders,
)
from torchtune_adaptive.recipe.checkpoints.resume_from import (
    Finished,
    Source,
    named_source,
    newest_source,
    say_what_is_replaced,
)
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.kind_table import KINDS

WEIGHTS = "model-00001-of-00001.safetensors"


def save(
    folder: CheckpointFolder, name: str, content: str = "", resumable: bool = True, **facts: Any
) -> Path:
    """A checkpoint of two files, or one if it is the end of a run."""
    staged = folder.begin(name)
    (staged / "original").mkdir()
    (staged / "original" / "params.json").write_text("{}")
    (staged / WEIGHTS).write_text(f"weights {content or name}")
    if resumable:
        (staged / STATE).write_text(f"state {content or name}")
    common = {"id": f"id of {content or name}", "recipe": "full", "epochs_run": 0}
    folder.publish(name, {**common, "resumable": resumable, **facts})
    return folder.path / name


def newest(path: Path, recipe: str = "full") -> tuple[str | None, list[str]]:
    found, skipped = CheckpointFolder(path).newest(recipe)
    return (found.name if found is not None else None), skipped


def names(path: Path) -> set[str]:
    return {below.name for below in path.iterdir()}


def test_what_is_published(tmp_path: Path) -> None:
    at = save(CheckpointFolder(tmp_path), "epoch_0_step_4", step=4)
    manifest = json.loads((at / MANIFEST).read_text())
    assert manifest["step"] == 4 and manifest["number"] == 1
    assert set(manifest["files"]) == {WEIGHTS, STATE, "original/params.json"}
    assert manifest["files"][WEIGHTS]["bytes"] == (at / WEIGHTS).stat().st_size
    linked = tmp_path / "recipe_state" / STATE
    assert linked.resolve() == (at / STATE).resolve() and linked.is_symlink()
    assert names(tmp_path) == {"epoch_0_step_4", "recipe_state"}
    assert last_saved(tmp_path) == str(at)
    assert last_saved(tmp_path / "nothing") == "none has been saved yet"


def test_a_copy_where_there_are_no_symbolic_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    at = save(CheckpointFolder(tmp_path), "epoch_0")
    linked = tmp_path / "recipe_state" / STATE
    assert not linked.is_symlink() and linked.read_bytes() == (at / STATE).read_bytes()


KILLED_SAVES: dict[str, tuple[list[str], str]] = {
    "the first": ([], "epoch_0"),
    "mid-epoch, which removes an older one": (
        ["epoch_0_step_2", "epoch_0_step_4"],
        "epoch_0_step_6",
    ),
    "an epoch, whose state replaces an older one": (["epoch_0", "epoch_1"], "epoch_2"),
    "under the name of an older one": (["epoch_0", "epoch_0_step_2"], "epoch_0"),
}


@pytest.mark.parametrize(("before", "name"), KILLED_SAVES.values(), ids=KILLED_SAVES)
def test_a_save_that_is_killed_at_any_operation(
    before: list[str], name: str, tmp_path: Path
) -> None:
    """Each copy of the folder, made before one operation of the save, is what a kill leaves there."""
    out, copies = tmp_path / "out", tmp_path / "copies"
    out.mkdir()
    for older in before:
        save(CheckpointFolder(out), older, "old")

    def save_and_copy() -> None:
        numbers = count(1)
        Copies(out, copies, lambda _: str(next(numbers)))
        save(CheckpointFolder(out), name, "new")

    assert in_child(save_and_copy) == 0
    killed = list(copies.iterdir())
    assert len(killed) > 25, f"{len(killed)} operations"
    outcomes = set()
    for path in [*killed, out]:
        found, _ = CheckpointFolder(path).newest("full")
        if found is None:
            assert not before, "there was one, and it is lost"
            continue
        (_, weights), (_, state) = (
            (found.folder / file).read_text().split() for file in (WEIGHTS, STATE)
        )
        assert weights == state, "both belong to the same checkpoint"
        assert state == ("new" if found.name == name and found.number > len(before) else "old")
        outcomes.add(state)
        save(CheckpointFolder(path), name, "next")  # and the next save is not hindered
        assert newest(path) == (name, [])
        assert not (path / ".saving").exists()
    assert outcomes == ({"new", "old"} if before else {"new"})


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize(("before", "name"), KILLED_SAVES.values(), ids=KILLED_SAVES)
def test_a_disk_that_fails_at_any_operation_of_a_save(
    before: list[str], name: str, stays: bool, tmp_path: Path, exhaustive: bool, shard: int
) -> None:
    """Whether it recovers or not, there is a whole checkpoint, and the next save is not hindered."""

    every = 1 if exhaustive else 7

    def save_and_fail() -> None:
        os.fsync = lambda _: None  # slow, and nothing is killed here
        fault = Fault()
        for number in count(1 + shard % every, every):
            out = tmp_path / str(number)
            out.mkdir()
            for older in before:
                save(CheckpointFolder(out), older, "old")
            folder = CheckpointFolder(out)
            fault.arm(number, stays)
            failed = False
            try:
                save(folder, name, "new")
            except OSError:
                failed = True
                folder.abandon(name)
            folder.newest_name()
            operations = fault.seen
            fault.arm(0)
            found, _ = CheckpointFolder(out).newest("full")
            if found is None:
                assert failed and not before, number
            else:
                files = ((found.folder / file).read_text() for file in (WEIGHTS, STATE))
                _, contents = zip(*(text.split() for text in files), strict=True)
                assert contents in (("new", "new"), ("old", "old")), number
                assert failed or contents == ("new", "new"), number
            save(CheckpointFolder(out), name, "next")
            assert newest(out) == (name, []), number
            assert not (out / ".saving").exists()
            if operations < number:
                assert number > 25 and not failed
                return

    assert in_child(save_and_fail) == 0


def test_what_outlives_a_loss_of_power(tmp_path: Path) -> None:
    """The order of operations; each single flush is needed, those of new folders above included."""
    out = tmp_path / "above" / "out"

    def save_and_record() -> None:
        operations = record_operations()
        CheckpointFolder(out).require_usable()
        for name in ("epoch_0_step_2", "epoch_0", "epoch_1", "epoch_2", "epoch_2"):
            save(CheckpointFolder(out), name)
            operations.append(("end", out, None))
        assert what_power_may_take(operations, out) == []
        second = operations.index(("end", out, None))  # the first has other folders to make
        flushes = [
            at
            for at, (kind, path, _) in enumerate(operations)
            if kind == "flush" and (at > second or path in out.parents)
        ]
        assert len(flushes) > 40
        for at in flushes:
            without = operations[:at] + operations[at + 1 :]
            assert what_power_may_take(without, out), operations[at]

    assert in_child(save_and_record) == 0


def test_by_default_two_can_be_resumed_from_and_the_weights_of_epochs_stay(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, "epoch_0_step_2")
    save(folder, "epoch_0_step_4")
    assert names(tmp_path) == {"epoch_0_step_2", "epoch_0_step_4", "recipe_state"}
    save(folder, "epoch_0")
    assert names(tmp_path) == {"epoch_0_step_4", "epoch_0", "recipe_state"}
    at = save(folder, "epoch_1_step_6")
    os.truncate(at / WEIGHTS, 3)
    name, (skipped,) = newest(tmp_path)
    assert name == "epoch_0" and skipped.startswith(f"epoch_1_step_6 ({WEIGHTS} is truncated")
    save(folder, "epoch_1")
    assert names(tmp_path) == {"epoch_0", "epoch_1_step_6", "epoch_1", "recipe_state"}
    assert names(tmp_path / "epoch_0") == {WEIGHTS, "original", MANIFEST}, "its state has gone"
    save(folder, "epoch_2", resumable=False)
    assert names(tmp_path) == {"epoch_0", "epoch_1_step_6", "epoch_1", "epoch_2", "recipe_state"}
    skipped = "epoch_2 (it is the end of a run, saved without its recipe state)"
    assert newest(tmp_path) == ("epoch_1", [skipped])
    assert (tmp_path / "recipe_state" / STATE).read_text() == "state epoch_1"


def test_as_many_as_the_user_wants(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for name in ("epoch_0_step_2", "epoch_0_step_4", "epoch_0", "epoch_1_step_6"):
        save(folder, name)
    assert names(tmp_path) == {"epoch_0", "epoch_1_step_6", "recipe_state"}
    assert (tmp_path / "epoch_0" / STATE).exists()
    damaged = tmp_path / "epoch_1_step_6" / WEIGHTS
    damaged.write_text(damaged.read_text().upper())
    name, (skipped,) = newest(tmp_path)
    assert name == "epoch_0" and skipped == f"epoch_1_step_6 ({WEIGHTS} is corrupted (checksum))"


def test_a_link_that_leads_nowhere_is_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, "epoch_0")
    save(folder, "epoch_1", resumable=False)
    assert names(tmp_path) == {"epoch_1", "recipe_state"}
    assert not list((tmp_path / "recipe_state").iterdir())


def put(key: str, *value: Any) -> None:
    """Put a value, if there is one, in place of one of a manifest; its folder is the last argument."""
    *new, at = value
    manifest = json.loads((at / MANIFEST).read_text())
    manifest.pop(key, None)
    if new:
        manifest[key] = new[0]
    (at / MANIFEST).write_text(json.dumps(manifest))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda at: os.truncate(at / WEIGHTS, 3), f"{WEIGHTS} is truncated (3 bytes"),
    "empty": (lambda at: os.truncate(at / STATE, 0), f"{STATE} is empty"),
    "longer": (lambda at: os.truncate(at / STATE, 99), f"{STATE} is too large"),
    "missing": (lambda at: (at / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
    "other bytes": (
        lambda at: (at / WEIGHTS).write_text((at / WEIGHTS).read_text().upper()),
        f"{WEIGHTS} is corrupted",
    ),
    "no manifest": (lambda at: (at / MANIFEST).unlink(), f"it has no {MANIFEST}"),
    "truncated manifest": (lambda at: os.truncate(at / MANIFEST, 40), "is damaged"),
    "wrong manifest": (lambda at: (at / MANIFEST).write_text("[1]"), "is damaged"),
    "newer manifest": (lambda at: (at / MANIFEST).write_text('{"format": 9}'), "another release"),
    "state removed": (lambda at: (at / STATE).unlink(), "recipe state is missing"),
    **{
        f"manifest: {key} is {value!r}": (
            partial(put, key, value),
            f"is damaged: {key} is {value!r}",
        )
        for key, value in [
            ("number", "x"),
            ("number", None),
            ("number", True),
            ("number", 1.5),
            ("id", 7),
            ("recipe", None),
            ("resumable", "yes"),
            ("epochs_run", [1]),
            ("step", "2"),
            ("samples", {}),
        ]
    },
    **{
        f"manifest without {key}": (partial(put, key), f"is damaged: {key} is missing")
        for key in ("number", "id", "recipe", "resumable", "epochs_run")
    },
    **{
        f"manifest with files {value!r}": (partial(put, "files", value), "is damaged")
        for value in (None, [], {}, {WEIGHTS: None}, {WEIGHTS: {"bytes": "1", "sha256": ""}})
    },
    "manifest without files": (partial(put, "files"), "is damaged"),
    "manifest without the state": (
        lambda at: put("files", {"other": {"bytes": 1, "sha256": ""}}, at),
        f"is damaged: it does not list {STATE}",
    ),
    "a folder for a manifest": (
        lambda at: ((at / MANIFEST).unlink(), (at / MANIFEST).mkdir()),
        "cannot be read",
    ),
    "a folder for a file": (
        lambda at: ((at / WEIGHTS).unlink(), (at / WEIGHTS).mkdir()),
        WEIGHTS,
    ),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found_and_named(
    damage: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    folder = CheckpointFolder(tmp_path, keep=5)
    save(folder, "epoch_0")
    at = save(folder, "epoch_1")
    damage(at)
    name, (skipped,) = newest(tmp_path)
    assert name == "epoch_0" and skipped.startswith("epoch_1 (") and reason in skipped
    damage(tmp_path / "epoch_0")
    with pytest.raises(CheckpointError, match=r"none of the checkpoints can be resumed from"):
        newest(tmp_path)


def test_checkpoints_of_another_recipe_and_of_torchtune(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=5)
    save(folder, "epoch_0", recipe="lora")
    with pytest.raises(CheckpointError, match=r"epoch_0 \(it was saved by the lora recipe\)"):
        newest(tmp_path)
    assert newest(tmp_path, "lora") == ("epoch_0", [])
    theirs = tmp_path / "dist_epoch_3"
    theirs.mkdir()
    (theirs / ".metadata").write_text("torch writes it last")
    assert newest(tmp_path)[0] == "dist_epoch_3"
    (theirs / MANIFEST).write_text("{}")  # not theirs
    with pytest.raises(CheckpointError, match=r"dist_epoch_3 \(its .* is damaged"):
        newest(tmp_path)
    (theirs / MANIFEST).unlink()
    save(folder, "epoch_0")
    assert newest(tmp_path) == ("epoch_0", []), "what can be verified comes first"


def test_nothing_has_been_saved_yet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.begin("epoch_0")
    with caplog.at_level("WARNING"):
        assert newest_source(CheckpointFolder(tmp_path), KINDS["full"], 1) is None
    (line,) = caplog.messages
    assert "starts from the beginning" in line
    assert "epoch_0 (its run ended while saving it)" in line


def test_a_new_run_says_what_it_replaces(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        say_what_is_replaced(CheckpointFolder(tmp_path))
        assert not caplog.messages
        at = save(CheckpointFolder(tmp_path), "epoch_0", resumable=False)
        say_what_is_replaced(CheckpointFolder(tmp_path))
    (line,) = caplog.messages
    assert line.startswith(f"{at} is of an earlier run") and "or another output_dir" in line


@pytest.mark.parametrize("resumable", [True, False])
def test_the_end_of_a_run(resumable: bool, tmp_path: Path) -> None:
    """It is one for as many epochs, with its recipe state or without; more of them need it."""
    folder, kind = CheckpointFolder(tmp_path), KINDS["full"]
    save(folder, "epoch_0", epochs_run=1)
    at = save(folder, "epoch_1", epochs_run=2, resumable=resumable)
    for epochs in (1, 2):
        assert newest_source(folder, kind, epochs) == Finished(str(at), 2)
    more = newest_source(folder, kind, 3)
    assert isinstance(more, Source) and more.state is not None
    assert Path(more.state).parent.name == ("epoch_1" if resumable else "epoch_0")
    os.truncate(at / WEIGHTS, 3)
    assert newest_source(folder, kind, 1) == Finished(str(tmp_path / "epoch_0"), 1)


def test_only_one_run_writes_into_a_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked.of(config(tmp_path), "full")
    (tmp_path / "out").mkdir()

    def take() -> ExitStack:
        until_exit = ExitStack()
        take_output_folders(asked, Alone(), until_exit)
        return until_exit

    def is_refused() -> None:
        with pytest.raises(
            CheckpointError, match=r"out: another run is using it \(process \d+ on "
        ):
            take()

    taken = take()
    assert in_child(is_refused) == 0
    again = take()  # by the same process, as in a notebook
    taken.close()
    assert in_child(is_refused) == 0
    again.close()
    assert in_child(take) == 0
    assert in_child(lambda: (take(), os.kill(os.getpid(), 9))) == -9
    assert in_child(take) == 0, "a killed run leaves none"

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level("WARNING"):
        take()
    assert "cannot be locked (No locks available)" in caplog.text


def config(path: Path, **checkpointer: Any) -> Any:
    base = path / "base"
    base.mkdir(parents=True, exist_ok=True)
    (base / WEIGHTS).write_text("base")
    common = {"output_dir": str(path / "out"), "checkpoint_dir": str(base)}
    files = {"checkpoint_files": [WEIGHTS], "recipe_checkpoint": None}
    return OmegaConf.create(
        {
            "output_dir": str(path / "out"),
            "checkpointer": {**common, **files, **checkpointer},
        }
    )


def test_what_a_config_names(tmp_path: Path) -> None:
    out = tmp_path / "out"
    folder = CheckpointFolder(out, keep=5)
    save(folder, "epoch_0")
    save(folder, "epoch_1")
    assert named_source(config(tmp_path), KINDS["full"]) is None
    weights = {"checkpoint_files": [f"epoch_0/{WEIGHTS}"]}
    first = named_source(config(tmp_path, **weights), KINDS["full"])
    assert first is not None and first.state == str(out / "epoch_0" / STATE), "from beside them"
    assert first.weights == (str(out / "epoch_0" / WEIGHTS),)
    first.require_same("id of epoch_0")
    with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
        first.require_same("id of epoch_1")
    with pytest.raises(CheckpointError, match="there is no such file"):
        named_source(config(tmp_path, checkpoint_files=[f"epoch_7/{WEIGHTS}"]), KINDS["full"])
    with pytest.raises(CheckpointError, match="there is no such file"):
        named_source(config(tmp_path, **weights, recipe_checkpoint="elsewhere.pt"), KINDS["full"])
    both = [f"epoch_0/{WEIGHTS}", f"epoch_1/{WEIGHTS}"]
    with pytest.raises(CheckpointError, match="belong to different checkpoints"):
        named_source(config(tmp_path, checkpoint_files=both), KINDS["full"])
    os.truncate(out / "epoch_0" / WEIGHTS, 2)
    with pytest.raises(CheckpointError, match=r"epoch_0: model-.* is truncated"):
        named_source(config(tmp_path, **weights), KINDS["full"])
    (out / "empty.pt").touch()
    other = {"checkpoint_files": [f"epoch_1/{WEIGHTS}"], "recipe_checkpoint": "empty.pt"}
    with pytest.raises(CheckpointError, match=r"empty.pt: is empty"):
        named_source(config(tmp_path, **other), KINDS["full"])


def test_what_cannot_be_verified_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        Source(state="state.pt", weights=("a",), checkpoint="one").require_same(None)
    assert "cannot be verified to belong together" in caplog.text


def test_adapters_that_a_config_names(tmp_path: Path) -> None:
    out = tmp_path / "out"
    folder = CheckpointFolder(out)
    staged = folder.begin("epoch_0")
    (staged / "adapter_model.pt").write_text("adapters")
    (staged / STATE).write_text("state")
    folder.publish("epoch_0", {"id": "1", "recipe": "lora", "resumable": True, "epochs_run": 1})
    state = f"recipe_state/{STATE}"
    source = named_source(config(tmp_path, recipe_checkpoint=state), KINDS["lora"])
    assert source is not None and source.checkpoint == "1"
    assert source.adapters == str((out / "epoch_0" / "adapter_model.pt").resolve())
    (out / "epoch_0" / "adapter_model.pt").unlink()
    with pytest.raises(CheckpointError, match=r"Set checkpointer.adapter_checkpoint"):
        named_source(config(tmp_path, recipe_checkpoint=state), KINDS["lora"])


def _file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


IN_THE_WAY: dict[str, tuple[Callable[[Path], object], str]] = {
    "output folder": (_file, "cannot be written to"),
    "above the output folder": (lambda out: _file(out.parent), "cannot be written to"),
    "recipe state folder": (lambda out: _file(out / "recipe_state"), "is a file where"),
    "staging": (lambda out: _file(out / ".saving"), "is a file where"),
    "checkpoint": (lambda out: _file(out / "epoch_0"), "is a file where"),
    "mid-epoch": (lambda out: _file(out / "epoch_0_step_4"), "is a file where"),
    "recipe state": (
        lambda out: (out / "recipe_state" / STATE).mkdir(parents=True),
        "is a folder where",
    ),
}


@pytest.mark.parametrize(("obstruct", "said"), IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_what_is_in_the_way_is_found_at_the_start(
    obstruct: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    cfg = config(tmp_path)
    cfg.output_dir = cfg.checkpointer.output_dir = str(tmp_path / "above" / "out")
    take_output_folders(Asked.of(cfg, "full"), Alone(), ExitStack())
    shutil.rmtree(tmp_path / "above")
    obstruct(tmp_path / "above" / "out")
    with pytest.raises(CheckpointError, match=said):
        take_output_folders(Asked.of(cfg, "full"), Alone(), ExitStack())


def test_a_folder_that_cannot_be_flushed_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on some network filesystems; files can, and a real failure is one."""
    fsync = os.fsync

    def flush(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(22, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    save(CheckpointFolder(tmp_path), "epoch_0")

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        durable.write_durably(tmp_path / "file", b"")
    assert "file" not in names(tmp_path), "nothing is left behind"
