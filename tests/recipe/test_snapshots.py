"""Snapshots between checkpoints: a run that dies goes on from the newest that is whole, to the bit."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from omegaconf import DictConfig
from torch.distributed.checkpoint import filesystem

from tests.helpers.killing import Copies
from tests.helpers.ranks import Alone, run_ranks, watch_ranks
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import (
    RESUME,
    Records,
    assert_same_end,
    assert_same_records,
    assert_same_steps,
    assert_same_weights,
    train,
    undisturbed,
)
from tests.helpers.snapshots import EVERY, run_killed
from torchtune_adaptive.common import durable
from torchtune_adaptive.recipe.checkpoints import sharded, snapshots
from torchtune_adaptive.recipe.checkpoints.all_or_none import AllOrNone
from torchtune_adaptive.recipe.checkpoints.folder import NONE_SINCE, CheckpointFolder, Since
from torchtune_adaptive.recipe.checkpoints.snapshots import Snapshots, lack_of_room
from torchtune_adaptive.recipe.settings.asked import Asked

STEPS = {"max_steps_per_epoch": 8, "epochs": 1}
GRPO = {
    **{"dataset.split": "train[:8]", "max_generated_tokens": 8, "num_steps": 3, "epochs": 3},
    **{"batch_size": 4, "grpo_samples": 2, "max_steps_per_epoch": None, "save_every_n_epochs": 3},
}
PPO = {
    **{"dataset.split": "train[:16]", "max_generated_tokens": 8, "num_steps": 16, "epochs": 2},
    **{"batch_size": 4, "ppo_batch_size": 2, "max_steps_per_epoch": 1},
}
GIB = 1 << 30


def taking(folder: Path, every: int = 2) -> dict[str, Any]:
    return {EVERY: every, "adaptive_batching.snapshot_folder": str(folder / "memory")}


def killed(kind: str, folder: Path, ranks: int, after: int, **changes: Any) -> None:
    cfg = tiny_config(kind, folder / "out", **changes)
    ended = watch_ranks(
        run_killed, ranks, kind, cfg, after, until_exit_of=[*range(ranks)], join=False
    )
    assert all(each.exit_code == -signal.SIGKILL for each in ended), ended[0].said


def taken(folder: Path) -> dict[int, Path]:
    """The snapshots that are there, by their step."""
    found = (folder / "memory").glob("*/*/epoch_*")
    return {int(each.name.rpartition("_")[2]): each for each in found}


# --- whole runs ---------------------------------------------------------------------------------------

RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "full": ("full", 2, STEPS),
    "alone": ("full", 1, STEPS),
    "optimizer in backward": ("full", 2, {**STEPS, "optimizer_in_bwd": True}),
    "lora": ("lora", 2, {**STEPS, "model.lora_dropout": 0.1}),
    "preference": ("full_dpo", 2, STEPS),
    "sharded checkpoints": (
        "full",
        2,
        {
            **STEPS,
            "adaptive_batching.sharded_checkpoints": "background",
            "save_every_n_steps": 5,
        },
    ),
}
QUICK = {"full", "lora"}


@pytest.mark.runs
@pytest.mark.alternating
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.exhaustive) for n in RUNS]
)
def test_a_run_that_dies_goes_on_from_its_newest_snapshot(name: str, tmp_path: Path) -> None:
    kind, ranks, changes = RUNS[name]
    whole, expected = undisturbed(kind, ranks, **changes)
    killed(kind, tmp_path, ranks, 7, **changes, **taking(tmp_path))
    assert 4 in taken(tmp_path) and len(taken(tmp_path)) == 2, "the newest two"
    assert not list((tmp_path / "out").glob("epoch_0"))
    resumed = train(kind, tmp_path / "out", ranks, **changes, **taking(tmp_path), **RESUME)
    assert len(resumed) == 2, "from step 6"
    assert_same_end(resumed, expected)
    assert_same_weights(whole / "epoch_0", tmp_path / "out" / "epoch_0")
    assert not list((tmp_path / "memory").iterdir())
    assert not (tmp_path / "out" / snapshots.NAME).exists()


@pytest.mark.runs
@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "changes"), [("grpo", GRPO), ("ppo", PPO)])
def test_rollouts_have_snapshots_at_their_end(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    whole, expected = undisturbed(kind, 2, **changes)
    last = max(int(record["step"]) for record in expected)
    killed(kind, tmp_path, 2, last - 1, **changes, **taking(tmp_path, 1))
    assert taken(tmp_path)
    resumed = train(kind, tmp_path / "out", 2, **changes, **taking(tmp_path, 1), **RESUME)
    assert 0 < len(resumed) < len(expected)
    assert_same_end(resumed, expected)
    end = max(each.name for each in whole.glob("epoch_*"))
    assert_same_weights(whole / end, tmp_path / "out" / end)


@pytest.mark.runs
@pytest.mark.alternating
def test_other_ranks_go_on(tmp_path: Path) -> None:
    changes = {**STEPS, "batch_size": 3, "dataset.split": "train[:60]"}
    _, expected = undisturbed("full", 2, **changes)
    run = tmp_path / "run"
    killed("full", run, 2, 5, **changes, **taking(run))
    run.rename(tmp_path / "kept")
    for ranks in (1, 3):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(tmp_path / "kept", run)
        resumed = train("full", run / "out", ranks, **changes, **taking(run), **RESUME)
        assert_same_steps(resumed, expected[4:])


# --- which one is resumed from ------------------------------------------------------------------------


SAVING = {**STEPS, "save_every_n_steps": 4}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves that was killed after step 7: snapshots of steps 6 and 7, a checkpoint of step 4."""
    run = tmp_path_factory.mktemp("left") / "run"
    killed("full", run, 2, 7, **SAVING, **taking(run, 1))
    assert taken(run).keys() == {6, 7}
    return run.rename(run.with_name("kept"))


def again(left: Path) -> Path:
    """The same once more, where it was."""
    run = left.with_name("run")
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(left, run, symlinks=True)
    return run


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def corrupt(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def goes_on_after(step: int, run: Path, **changes: Any) -> None:
    whole, expected = undisturbed("full", 2, **STEPS)
    resumed = train("full", run / "out", 2, **{**SAVING, **taking(run, 1), **changes}, **RESUME)
    assert len(resumed) == 8 - step
    assert_same_end(resumed, expected)
    assert_same_weights(whole / "epoch_0", run / "out" / "epoch_0")
    assert not taken(run)


@pytest.mark.runs
@pytest.mark.alternating
@pytest.mark.rotating
@pytest.mark.parametrize("damage", [Path.unlink, truncate, corrupt])
@pytest.mark.parametrize(
    "file", ["__1_0.distcp", ".metadata", "training_state.pt", durable.MANIFEST]
)
def test_one_that_is_not_whole_is_passed_over(
    file: str, damage: Callable[[Path], None], left: Path
) -> None:
    """For the one before and, if that is not whole either, for the checkpoint."""
    run = again(left)
    damage(taken(run)[7] / file)
    goes_on_after(6, run)
    run = again(left)
    for each in taken(run).values():
        damage(each / file)
    goes_on_after(4, run)


@pytest.mark.runs
@pytest.mark.alternating
def test_without_a_checkpoint_it_begins_anew_if_none_is_whole(tmp_path: Path) -> None:
    killed("full", tmp_path, 2, 3, **STEPS, **taking(tmp_path))
    (taken(tmp_path)[2] / ".metadata").unlink()
    goes_on_after(0, tmp_path, save_every_n_steps=None)


@pytest.mark.runs
@pytest.mark.alternating
def test_a_snapshot_counts_without_the_setting(left: Path) -> None:
    goes_on_after(7, again(left), **{EVERY: None})


@pytest.mark.runs
@pytest.mark.alternating
def test_a_checkpoint_that_was_saved_since_counts(left: Path, tmp_path: Path) -> None:
    """As on another machine, whose restarts had no snapshots: what is left here is older."""
    run = again(left)
    (run / "memory").rename(tmp_path / "memory")
    on_the_other = {**SAVING, EVERY: None, "save_every_n_steps": 5}
    cfg = tiny_config("full", run / "out", **on_the_other, **RESUME)
    watch_ranks(run_killed, 2, "full", cfg, 6, until_exit_of=[0, 1], join=False)
    assert (run / "out" / "epoch_0_step_5").exists()
    (tmp_path / "memory").rename(run / "memory")
    goes_on_after(5, run)


@pytest.mark.runs
@pytest.mark.alternating
def test_a_run_that_begins_anew_has_none_of_an_earlier_one(left: Path) -> None:
    """Nor has one in a new output folder of the same name, though it may resume."""
    _, expected = undisturbed("full", 2, **STEPS)
    run = again(left)
    anew = {**STEPS, **taking(run), EVERY: None}
    assert_same_records(train("full", run / "out", 2, **anew), expected)
    assert not taken(run)
    run = again(left)
    shutil.rmtree(run / "out")
    goes_on_after(0, run, save_every_n_steps=None)


@pytest.mark.runs
@pytest.mark.alternating
def test_a_search_alone_leaves_them(left: Path) -> None:
    run = again(left)
    changes = {"use_maximum_batch_size": True, "adaptive_batching.memory_limit": "40MiB"}
    only = {**STEPS, **changes, "adaptive_batching.search_only": True}
    train("full", run / "out", 2, **only, **taking(run, 1))
    assert taken(run).keys() == {6, 7} and (run / "out" / snapshots.NAME).exists()


# --- killed while it is written -----------------------------------------------------------------------


def what_is_resumed(copy: Path) -> str:
    """The step that a run goes on after, and where it was saved; 99 if it is finished."""
    [*places] = (copy / "memory").glob("*/*")
    saved, skipped = CheckpointFolder(copy / "out"), list[str]()
    saved.complete_interrupted()
    since = CheckpointFolder(places[0]).since(saved.newest_id(), skipped) if places else []
    found, _ = saved.newest("full", epochs=1, snapshots=Since(since[0] if since else None, skipped))
    if found is None:
        return "0"
    return "99" if found.epochs_run else f"{found.facts['step']} in {found.folder.parent.name}"


def run_and_copy(
    cfg: DictConfig, run: Path, into: Path, every: int
) -> tuple[list[str], dict[str, Path]]:
    """A run whose folders are copied before each operation on files, from the first snapshot on."""
    take, copies = Snapshots.take, list[Copies]()

    def take_and_copy(self: Snapshots, *arguments: Any) -> None:
        if not copies:
            copies.append(Copies(run, into / os.environ["RANK"], what_is_resumed, every))
        take(self, *arguments)

    Snapshots.take = take_and_copy  # type: ignore[method-assign]
    run_ours("full", cfg)
    return copies[0].states, copies[0].kept


@pytest.mark.runs
@pytest.mark.alternating
def test_wherever_a_run_is_killed_it_resumes_exactly(
    tmp_path: Path, exhaustive: bool, shard: int
) -> None:
    whole, expected = undisturbed("full", 2, **STEPS)
    run, every = tmp_path / "run", 1 if exhaustive else 5
    changes = {**STEPS, "save_every_n_steps": 5, **taking(run, 1)}
    cfg = tiny_config("full", run / "out", **changes)
    copied = run_ranks(run_and_copy, 2, cfg, run, tmp_path / "copies", every, join=False)
    kept: dict[str, Path] = {}
    for states, copies in copied:
        assert len(states) * every > 40, "operations of several snapshots"
        steps = [int(state.split()[0]) for state in states]
        assert steps == sorted(steps), "what was resumed from once is never lost"
        kept |= copies
    assert len(kept) > 4
    if not exhaustive:
        first = shard % (len(kept) - 1)
        kept = dict([*kept.items()][first : first + 2])
    for state, copy in kept.items():
        shutil.rmtree(run)
        copy.rename(run)
        resumed = train("full", run / "out", 2, **changes, **RESUME)
        assert len(resumed) == max(0, 8 - int(state.split()[0]))
        assert_same_end(resumed, expected)
        assert_same_weights(whole / "epoch_0", run / "out" / "epoch_0")
        assert not taken(run)


# --- whose folder it is -------------------------------------------------------------------------------


def snapshots_of(run: Path, **changes: Any) -> Snapshots:
    (run / "out").mkdir(parents=True, exist_ok=True)
    cfg = tiny_config("full", run / "out", **{**taking(run), **changes})
    return Snapshots(Asked.of(cfg, "full"), AllOrNone(Alone()), torch.device("cpu"))


def a_link(folder: Path, victim: Path) -> None:
    folder.symlink_to(victim)


def open_to_others(folder: Path, victim: Path) -> None:
    shutil.copytree(victim, folder)
    folder.chmod(0o777)


def of_another_user(folder: Path, victim: Path) -> None:
    shutil.copytree(victim, folder)
    folder.chmod(0o700)
    try:
        os.chown(folder, 12345, -1)
    except PermissionError:
        pytest.skip("only root can give a folder away")


@pytest.mark.parametrize("how", [a_link, open_to_others, of_another_user])
def test_a_folder_of_somebody_else_is_neither_used_nor_changed(
    how: Callable[[Path, Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots_of(tmp_path).close()
    place = snapshots_of(tmp_path)._place
    shutil.rmtree(place)
    victim = tmp_path / "victim"
    (victim / "thesis").mkdir(parents=True)
    (victim / "thesis" / "chapter").write_text("1")
    how(place, victim)
    for changes in ({}, {EVERY: None}, RESUME):
        ours = snapshots_of(tmp_path, **changes)
        ours.begin(torch.nn.Linear(1, 1))
        assert ours.newest(None) is NONE_SINCE
        ours.close()
        assert (place / "thesis" / "chapter").read_text() == "1"
        assert [each.name for each in place.iterdir()] == ["thesis"]
    lines = {each.getMessage() for each in caplog.records}
    assert len(lines) == 1 and "No snapshots are taken in" in lines.pop()


def test_others_cannot_look_into_it(tmp_path: Path) -> None:
    ours = snapshots_of(tmp_path)
    for folder in (ours._place, ours.folder.path):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert str(os.geteuid()) in ours._place.name


def test_a_file_in_the_output_folder_names_no_other_folder(tmp_path: Path) -> None:
    snapshots_of(tmp_path)
    (tmp_path / "out" / snapshots.NAME).write_text("../../victim")
    (tmp_path / "victim").mkdir()
    snapshots_of(tmp_path, **RESUME).close()
    assert (tmp_path / "victim").exists()


def test_containers_whose_output_folders_have_one_path_keep_theirs(tmp_path: Path) -> None:
    """Their folders are on volumes of their own, and the machine's memory is shared."""
    first = snapshots_of(tmp_path)
    (tmp_path / "out").rename(tmp_path / "volume")
    second = snapshots_of(tmp_path)
    assert first._place == second._place and first.folder.path.exists()
    second.close()
    assert first.folder.path.exists()
    first.close()
    assert not first._place.exists()


def test_what_a_run_has_left_that_is_gone_is_removed(tmp_path: Path) -> None:
    left = snapshots_of(tmp_path)
    assert left._used is not None
    os.close(left._used)
    snapshots_of(tmp_path, **{EVERY: None}).close()
    assert not left._place.exists()


# --- where there is no room ---------------------------------------------------------------------------


def run_and_listen(cfg: DictConfig, how: Callable[[], Any]) -> tuple[Records, list[str]]:
    """A run with something changed; what it logged, and what it warned of."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchtune_adaptive").addHandler(handler)
    how()
    return run_ours("full", cfg), [line for line in said if "napshot" in line]


def without_memory() -> None:
    snapshots.available_memory = lambda: 1 << 16  # type: ignore[assignment]


def without_room_for_parts() -> None:
    if os.environ["RANK"] == "1":
        full = mock.Mock(side_effect=OSError(28, "No space left on device"))
        sharded.FileSystemWriter.write_data = full  # type: ignore[method-assign]


def without_room_in_one_of_its_threads() -> None:
    """A full disk that a thread of the writer meets, whose exceptions torch loses."""
    write = filesystem._write_item

    def fail(*arguments: Any) -> Any:
        if "_write_files_from_queue" in threading.current_thread().name:
            raise OSError(28, "No space left on device")
        return write(*arguments)

    if os.environ["RANK"] == "1":
        filesystem._write_item = fail


def leaving_the_others_in_the_middle() -> None:
    save, fails = sharded.dcp.save, os.environ["RANK"] == "1"

    def fail_once(*arguments: Any, **named: Any) -> Any:
        nonlocal fails
        if fails:
            fails = False
            raise RuntimeError("no reason")
        return save(*arguments, **named)

    sharded.dcp.save = fail_once


def without_room_for_state() -> None:
    begin = CheckpointFolder.begin

    def fail(self: CheckpointFolder, name: str) -> Path:
        if "memory" in str(self.path):
            raise OSError(28, "No space left on device", str(self.path))
        return begin(self, name)

    CheckpointFolder.begin = fail  # type: ignore[method-assign]


@pytest.mark.runs
@pytest.mark.alternating
@pytest.mark.parametrize(
    ("how", "why"),
    [
        (without_memory, r"more of the host's memory, of which 64 KiB are free"),
        (without_room_for_parts, r"could not be written .* \(No space left on device\)"),
        (without_room_for_state, r"could not be written .* \(No space left on device: "),
        (without_room_in_one_of_its_threads, r"could not be written .* tensors were not written"),
        (leaving_the_others_in_the_middle, "could not be written"),
    ],
)
def test_training_goes_on_without_them_and_that_is_said_once(
    how: Callable[[], None], why: str, tmp_path: Path
) -> None:
    whole, expected = undisturbed("full", 2, **STEPS)
    cfg = tiny_config("full", tmp_path / "out", **STEPS, **taking(tmp_path))
    cfg.adaptive_batching.sharded_checkpoints = False
    (records, said), (_, elsewhere) = run_ranks(run_and_listen, 2, cfg, how, join=False)
    assert_same_records(records, expected)
    assert_same_weights(whole / "epoch_0", tmp_path / "out" / "epoch_0")
    assert len(said) == 1 and not elsewhere, said
    assert re.search(why, said[0]), said
    assert not taken(tmp_path)


ROOM = {"in_folder": 99 * GIB, "in_memory": 99 * GIB, "held": 0, "staged": False}


@pytest.mark.parametrize(
    ("changes", "memory_backed", "machines", "missing"),
    [
        ({}, True, 1, None),
        ({"in_folder": 3 * GIB}, False, 1, None),
        ({"in_folder": 3 * GIB - 1}, False, 1, "they take 3 GiB more"),
        ({"in_folder": GIB, "held": 2 * GIB}, False, 1, None),
        ({"in_memory": 4 * GIB}, True, 1, None),
        ({"in_memory": 4 * GIB - 1}, True, 1, "they take 4 GiB more of the host's memory"),
        ({"in_memory": 3 * GIB, "staged": True}, True, 1, None),
        ({"in_memory": GIB, "staged": True, "held": 2 * GIB}, True, 1, None),
        ({"in_memory": GIB - 1}, False, 1, "they take 1 GiB more of the host's memory"),
        ({"in_memory": GIB // 2}, False, 2, None),
    ],
)
def test_the_room_that_they_need(
    changes: dict[str, int], memory_backed: bool, machines: int, missing: str | None
) -> None:
    room = {**ROOM, **changes}
    found = lack_of_room(GIB, GIB // machines, memory_backed=memory_backed, **room)  # type: ignore[arg-type]
    assert (found is None) == (missing is None) and (missing or "") in (found or "")
