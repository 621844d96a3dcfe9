"""Snapshots on several machines, each with a folder of its own and a copy of its neighbour's parts.

A machine that is lost for good, with all it has, loses at most the steps since the last snapshot. Machines
are ranks here that are told so, and that know no folder of another one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.killing import Copies
from tests.helpers.ranks import Alone, run_ranks
from tests.helpers.runs import (
    assert_same_end,
    assert_same_records,
    assert_same_steps,
    assert_same_weights,
    undisturbed,
)
from tests.helpers.snapshots import EVERY, Machines
from torchtune_adaptive.common import RankLost, durable
from torchtune_adaptive.core import Ranks
from torchtune_adaptive.recipe.checkpoints import neighbours, snapshots, transfer, whole
from torchtune_adaptive.recipe.checkpoints.all_or_none import AllOrNone
from torchtune_adaptive.recipe.checkpoints.folder import NONE_SINCE, CheckpointFolder
from torchtune_adaptive.recipe.checkpoints.places import Places
from torchtune_adaptive.recipe.checkpoints.snapshots import Snapshots
from torchtune_adaptive.recipe.checkpoints.transfer import Sent, exchange
from torchtune_adaptive.recipe.checkpoints.whole import WholeSnapshots

STEPS = {"max_steps_per_epoch": 8, "epochs": 1}
SAVING = {**STEPS, "save_every_n_steps": 4, EVERY: 1}


# --- a machine is lost --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Machines:
    """What two machines with a rank each leave, killed after step 7, with a checkpoint of step 4."""
    machines = Machines([0, 1], tmp_path_factory.mktemp("left") / "run", **SAVING)
    machines.killed(7)
    assert machines.taken() == {6: {0, 1}, 7: {0, 1}}
    machines.folder.rename(machines.folder.with_name("kept"))
    return machines


def again(left: Machines) -> Machines:
    """The same once more, where it was."""
    shutil.rmtree(left.folder, ignore_errors=True)
    shutil.copytree(left.folder.with_name("kept"), left.folder, symlinks=True)
    return left


@pytest.mark.runs
@pytest.mark.alternating
@pytest.mark.parametrize("lost", [0, 1])
def test_a_fresh_machine_takes_the_place_of_one_that_is_lost(lost: int, left: Machines) -> None:
    alone, expected = undisturbed("full", 2, **STEPS)
    run = again(left)
    shutil.rmtree(run.memory(lost))
    resumed = run.resume([2, 1] if lost == 0 else [0, 2])
    assert len(resumed) == 1, "from step 7"
    assert_same_end(resumed, expected)
    assert_same_weights(alone / "epoch_0", run.folder / "out" / "epoch_0")
    assert not [*run.folder.glob("machine_*/*")], "all is removed"


@pytest.mark.runs
@pytest.mark.alternating
def test_the_machines_that_are_left_go_on_as_from_a_checkpoint(
    left: Machines, tmp_path: Path
) -> None:
    """Bit for bit, on the same number of ranks."""
    saved = Machines([0, 1], tmp_path, **STEPS, save_every_n_steps=7)
    saved.killed(7)
    expected = saved.resume([0])
    for lost in (0, 1):
        run = again(left)
        shutil.rmtree(run.memory(lost))
        assert_same_records(run.resume([1 - lost]), expected)
        assert_same_weights(saved.folder / "out" / "epoch_0", run.folder / "out" / "epoch_0")


UNLIKE = [0, 0, 1, 2]
LOSSES = {
    "one of one rank": ([1], [0, 0, 2], 7),
    "one of two ranks": ([0], [1, 2], 7),
    "one that is replaced": ([2], [3, 0, 0, 1], 7),
    "two": ([0, 1], [2, 2], 4),
}


@pytest.mark.runs
@pytest.mark.alternating
@pytest.mark.rotating(2)
@pytest.mark.parametrize(("lost", "then", "step"), LOSSES.values(), ids=LOSSES)
def test_machines_with_unlike_numbers_of_ranks(
    lost: Sequence[int], then: Sequence[int], step: int, tmp_path: Path
) -> None:
    """A machine and its neighbour together take a part with them, so the checkpoint counts."""
    _, expected = undisturbed("full", 4, **STEPS)
    run = Machines(UNLIKE, tmp_path, **SAVING)
    run.killed(7)
    for machine in lost:
        shutil.rmtree(run.memory(machine))
    assert_same_steps(run.resume(then), expected[step:])


@pytest.mark.runs
@pytest.mark.alternating
@pytest.mark.parametrize("file", ["__1_0.distcp", ".metadata", "training_state.pt"])
def test_a_copy_takes_the_place_of_a_damaged_file(file: str, left: Machines) -> None:
    alone, expected = undisturbed("full", 2, **STEPS)
    run = again(left)
    [damaged] = run.memory(1).glob(f"*/*/epoch_0_step_7/{file}")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert_same_end(run.resume([0, 1]), expected[7:])
    assert_same_weights(alone / "epoch_0", run.folder / "out" / "epoch_0")


@pytest.mark.runs
@pytest.mark.alternating
def test_what_is_on_its_machine_is_not_sent(left: Machines) -> None:
    run = again(left)
    (run.folder / "machine_0").rename(run.folder / "machine_5")
    run = Machines([5, 1], run.folder, **SAVING)
    run.train(_refuse_to_send, resume_from_checkpoint=True)
    assert not [*run.folder.glob("machine_*/*")]


def _refuse_to_send() -> None:
    def refuse(files: Any, *arguments: Any) -> set[str]:
        assert not [*files]
        return set()

    whole.exchange = refuse


@pytest.mark.runs
@pytest.mark.alternating
def test_a_run_that_begins_anew_removes_what_is_on_all_machines(left: Machines) -> None:
    _, expected = undisturbed("full", 2, **STEPS)
    run = again(left)
    anew = Machines([0, 1], run.folder, **{**SAVING, EVERY: None})
    assert_same_records(anew.train(), expected)
    assert not [*run.folder.glob("machine_*/*/*/*")]


# --- killed while it is written -----------------------------------------------------------------------


def what_is_resumed(lost: int, copy: Path) -> str:
    """The step that a run goes on after without a machine; 99 if it is finished."""
    shutil.rmtree(copy / f"machine_{lost}", ignore_errors=True)
    saved = CheckpointFolder(copy / "out")
    saved.complete_interrupted()
    [*places] = copy.glob("machine_*/*/*")
    since = NONE_SINCE
    if places:
        alone = Places(0, (0,), ("",)), AllOrNone(Alone())
        since = WholeSnapshots(CheckpointFolder(places[0]), *alone).newest(saved.newest_id())
    found, _ = saved.newest("full", epochs=1, snapshots=since)
    return "0" if found is None else "99" if found.epochs_run else f"{found.facts['step']}"


def copy_always(run: Path, into: Path, lost: int, every: int) -> None:
    """Copy a run's folders before each operation on files, from the first snapshot on."""
    take, copies = Snapshots.take, list[Copies]()

    def take_and_copy(self: Snapshots, *arguments: Any) -> None:
        if not copies:
            state = partial(what_is_resumed, lost)
            copies.append(Copies(run, into / os.environ["RANK"], state, every))
        take(self, *arguments)

    def write() -> None:
        states, kept = copies[0].states, {step: str(at) for step, at in copies[0].kept.items()}
        (into / f"of_{os.environ['RANK']}.json").write_text(json.dumps([states, kept]))

    Snapshots.take = take_and_copy  # type: ignore[method-assign]
    close = Snapshots.close

    def close_and_write(self: Snapshots) -> None:
        close(self)
        write()

    Snapshots.close = close_and_write  # type: ignore[method-assign]


@pytest.mark.runs
@pytest.mark.alternating
@pytest.mark.rotating
@pytest.mark.parametrize("lost", [0, 1])
def test_whenever_a_machine_is_lost_the_run_goes_on_exactly(
    lost: int, tmp_path: Path, exhaustive: bool
) -> None:
    alone, expected = undisturbed("full", 2, **STEPS)
    every = 1 if exhaustive else 29
    run = Machines([0, 1], tmp_path / "run", **{**SAVING, "save_every_n_steps": 5})
    into = tmp_path / "copies"
    run.train(partial(copy_always, run.folder, into, lost, every))
    kept: dict[str, str] = {}
    for rank in (0, 1):
        states, copies = json.loads((into / f"of_{rank}.json").read_text())
        steps = [*map(int, states)]
        assert steps == sorted(steps), "what was resumed from once is never lost"
        kept |= copies
    assert len(kept) > 2, kept
    for step in kept if exhaustive else sorted(kept)[::2]:
        shutil.rmtree(run.folder)
        Path(kept[step]).rename(run.folder)
        shutil.rmtree(run.memory(lost), ignore_errors=True)
        resumed = run.resume([1 - lost, 2])
        assert len(resumed) == max(0, 8 - int(step))
        assert_same_end(resumed, expected)
        assert_same_weights(alone / "epoch_0", run.folder / "out" / "epoch_0")


# --- copies that cannot be made -----------------------------------------------------------------------


def train_and_listen(
    run: Machines, how: Callable[[], object]
) -> tuple[list[dict[str, float]], list[str]]:
    """What a run logged, and what it warned of about snapshots."""
    file = run.folder.with_suffix(".said")
    records = run.train(partial(_listen, file, how))
    return records, [line for line in file.read_text().splitlines() if "napshot" in line]


def _listen(file: Path, how: Callable[[], object]) -> None:
    handler = logging.FileHandler(file)
    handler.setLevel(logging.WARNING)
    logging.getLogger("torchtune_adaptive").addHandler(handler)
    how()


def late() -> None:
    """A machine that answers later than the others wait, once."""
    transfer.SILENCE = 1.0
    if os.environ["RANK"] == "1":
        neighbours.exchange = _late_once(neighbours.exchange, 4.0)


def stuck() -> None:
    """A machine that still writes when it is time for the next ones."""
    snapshots._LONGEST_WAIT = 2.0
    transfer.SILENCE = 0.5
    if os.environ["RANK"] == "1":
        neighbours.exchange = _late_once(neighbours.exchange, 8.0)


def _late_once(exchange: Any, seconds: float) -> Any:
    delays = [seconds]

    def wait_first(*arguments: Any) -> set[str]:
        time.sleep(delays.pop() if delays else 0)
        return exchange(*arguments)  # type: ignore[no-any-return]

    return wait_first


def full() -> None:
    """A machine with room for its own parts only, which is found when copies are written."""
    if os.environ["RANK"] == "1":
        file = partial(durable.HashedFile, Path("/dev/full"))
        transfer.durable = SimpleNamespace(  # type: ignore[assignment]
            HashedFile=lambda _, **how: file(**how)
        )


def small() -> None:
    """Machines with room for their own parts only."""
    snapshots.lack_of_room = lambda size, from_device, **_: (  # type: ignore[assignment]
        "they take more" if size > from_device else None
    )


def unconnected() -> None:
    """A rank that is not connected to the others in another group."""
    in_a_thread = Ranks.in_a_thread

    def fail(self: Ranks, seconds: float) -> Any:
        made = in_a_thread(self, seconds)
        if seconds == transfer.SILENCE and os.environ["RANK"] == "1":
            raise RankLost("timeout")
        return made

    Ranks.in_a_thread = fail  # type: ignore[method-assign]


@pytest.mark.runs
@pytest.mark.alternating
@pytest.mark.parametrize(
    ("how", "why"),
    [
        (late, r"has no copies on other machines, because rank 1 \(.*\) did not answer"),
        (stuck, r"takes more than 2 s: rank 1 \(.*\) still writes"),
        (full, r"of the snapshot \w+ have no copy .* be written there: rank 1 \("),
        (unconnected, "have no copies on other machines any more: timeout"),
        (small, r"have no copies on other machines: with them, on .*, they take more"),
    ],
)
def test_training_goes_on_without_copies_and_that_is_said_once(
    how: Callable[[], object], why: str, tmp_path: Path
) -> None:
    alone, expected = undisturbed("full", 2, **STEPS)
    run = Machines([0, 1], tmp_path / "run", **{**STEPS, EVERY: 1})
    records, said = train_and_listen(run, how)
    assert_same_records(records, expected)
    assert_same_weights(alone / "epoch_0", run.folder / "out" / "epoch_0")
    assert len(said) == (2 if how is stuck else 1) and re.search(why, said[0]), said


@pytest.mark.runs
@pytest.mark.alternating
def test_copies_are_made_again_after_a_failure(tmp_path: Path) -> None:
    _, expected = undisturbed("full", 2, **STEPS)
    run = Machines([0, 1], tmp_path / "run", **{**STEPS, EVERY: 1})
    run.killed(7, late)
    shutil.rmtree(run.memory(1))
    assert_same_end(run.resume([0, 2]), expected[7:])


# --- files that are sent ------------------------------------------------------------------------------

SIZES = (0, 1, 6, 7, 8, 50)


def send_all_to_all(folder: Path) -> tuple[set[str], dict[str, bytes]]:
    """Three ranks that send each other files, of which some cannot be read, and some not be written."""
    transfer._PIECE = 7
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    own, into = folder / f"of {rank}", folder / f"to {rank}"
    own.mkdir()
    into.mkdir()
    files = []
    for source in range(3):
        for target in {0, 1, 2} - {source}:
            for size in SIZES:
                content = bytes((source + size + each) % 251 for each in range(size))
                name = f"{source} {target} {size}"
                files.append(Sent(name, size, hashlib.sha256(content).hexdigest(), source, target))
                if source == rank and name != "0 1 50":
                    (own / name).write_bytes(content)
    if rank == 2:
        (into / "0 2 8").mkdir()
    arrived = exchange(files, group, own, into, 60)
    return arrived, {each.name: each.read_bytes() for each in into.iterdir() if each.is_file()}


def test_files_arrive_whole_or_not_at_all(tmp_path: Path) -> None:
    for rank, (arrived, there) in enumerate(run_ranks(send_all_to_all, 3, tmp_path)):
        wanted = {f"{source} {rank} {size}" for source in {0, 1, 2} - {rank} for size in SIZES}
        assert arrived == wanted - {"0 1 50", "0 2 8"} == there.keys()
        for name, content in there.items():
            source, _, size = map(int, name.split())
            assert content == bytes((source + size + each) % 251 for each in range(size))


@pytest.mark.parametrize(
    ("firsts", "neighbours"),
    [
        ((0, 0), [0, 1]),
        ((0, 1), [1, 0]),
        ((0, 0, 2, 2), [2, 3, 0, 1]),
        ((0, 0, 0, 3, 4), [3, 3, 3, 4, 0]),
        ((0, 1, 0, 1), [1, 0, 3, 2]),
    ],
)
def test_a_neighbour_is_on_the_next_machine(firsts: tuple[int, ...], neighbours: list[int]) -> None:
    places = Places(0, firsts, ("a",) * len(firsts))
    assert [*places.neighbours] == neighbours
