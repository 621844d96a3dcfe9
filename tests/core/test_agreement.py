"""How ranks agree, how long they wait for each other, and what is said about one that does not answer."""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.library import Trained, collate, rows_of
from tests.helpers.ranks import run_ranks
from torchtune_adaptive import RankLost, UsageError
from torchtune_adaptive.core.private import groups_here
from torchtune_adaptive.core.ranks import agreement
from torchtune_adaptive.core.ranks.agreement import Ranks


@pytest.mark.parametrize(
    ("minutes", "compiled", "expected"), [(5, False, 5), (5, True, 60), (90, True, 90)]
)
def test_ranks_wait_as_long_as_the_process_group(
    minutes: int, compiled: bool, expected: int, tmp_path: Path
) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path / 'store'}",
        timeout=timedelta(minutes=minutes),
        rank=0,
        world_size=1,
    )
    try:
        assert agreement._patience(compiled) == timedelta(minutes=expected)
    finally:
        dist.destroy_process_group()


def one_comes_late() -> tuple[timedelta, str]:
    """The time that ranks wait by default, and what is said where they wait for 3 seconds."""
    by_default = Trained("fsdp").step.ranks
    run = Trained("fsdp", timeout=3.0)
    dist.barrier()  # however long it takes to build the other's model
    run.step(rows_of(2), collate, 2)
    if not by_default.is_zero:
        time.sleep(5)
    with pytest.raises(RankLost) as lost:
        run.step(rows_of(2), collate, 2)
    return by_default._patience, str(lost.value)


@pytest.mark.ranks
def test_a_rank_that_comes_too_late_is_named_as_the_reason() -> None:
    [(patience, waiting), (_, late)] = run_ranks(one_comes_late, 2)
    assert patience >= timedelta(minutes=10)  # torch's own
    assert waiting.startswith("timeout: another rank has not answered for 3 s.")
    assert "this one came later than its timeout" in late


def numbers_of_ranks(one_collective: int) -> list[object]:
    """What the ranks hear of each other's numbers, in whatever order they wait for it."""
    agreement._ONE_COLLECTIVE = one_collective
    ranks = agreement.Ranks()
    own = 10 * ranks.rank - 7
    heard: list[object] = [ranks.spread(own), ranks.any(ranks.rank == 2), ranks.any(False)]
    end = ranks.begin_spread(own)
    heard += [end(), end()]
    end = ranks.begin_spread(-own)
    heard += [ranks.gather(own), end()]  # which is not what was asked first
    ranks.begin_spread(1000)  # nobody wants to know it
    heard += [ranks.from_rank_zero(own), ranks.spread(own)]
    part = ranks.alike(ranks.rank > 0)
    heard += [part.spread(own)]
    ranks.close()
    return heard


@pytest.mark.ranks
@pytest.mark.parametrize("one_collective", [7, 1], ids=["one collective", "a tree"])
def test_ranks_hear_of_the_ends_in_one_collective_or_along_a_tree(one_collective: int) -> None:
    said = run_ranks(numbers_of_ranks, 3, one_collective)
    everyones = [(-7, 13), True, False, (-7, 13), (-7, 13), [-7, 3, 13], (-13, 7), -7, (-7, 13)]
    assert said == [[*everyones, part] for part in ((-7, -7), (3, 13), (3, 13))]


def tensors_of_ranks() -> tuple[object, ...]:
    """What a rank has of everyone's tensor, and of rank 0's; also among some of the ranks, and alone."""
    ranks = agreement.Ranks()
    mine = torch.arange(3, dtype=torch.uint8) + 10 * ranks.rank
    end = ranks.begin_spread(ranks.rank)  # which they wait for first
    gathered = ranks.gather_tensor(mine)
    filled = torch.full((2, 2), ranks.rank, dtype=torch.int32)
    ranks.fill_from_rank_zero(filled)
    part = ranks.alike(ranks.rank > 0)
    of_part = part.gather_tensor(mine)
    alone = agreement.SomeRanks().gather_tensor(mine)
    assert alone is not None and torch.equal(alone[0], mine)
    ranks.close()
    lists = (None if each is None else each.tolist() for each in (gathered, of_part))
    return end(), *lists, filled.tolist()


@pytest.mark.ranks
def test_tensors_of_all_ranks_come_to_rank_zero_only() -> None:
    zeros = [[0, 0], [0, 0]]
    of_ranks = [[number, number + 1, number + 2] for number in (0, 10, 20)]
    assert run_ranks(tensors_of_ranks, 3) == [
        ((0, 2), of_ranks, of_ranks[:1], zeros),
        ((0, 2), None, of_ranks[1:], zeros),
        ((0, 2), None, None, zeros),
    ]


def takes_a_step_after_another_has_begun_one(way: str) -> list[str]:
    """The order of what happens on a rank that begins its step only after the other has collated rows."""
    events: list[str] = []
    run = Trained(way)
    for _ in range(3):  # the first ones are recorded
        run.step(rows_of(2), collate, 2)
    store = dist.PrefixStore("of the test", dist.distributed_c10d._get_default_store())
    store.set_timeout(timedelta(seconds=60))

    def telling(rows: list[object]) -> object:
        if dist.get_rank() == 0:
            store.set("collated", "yes")
        events.append("collated")
        return collate(rows)

    if dist.get_rank() == 1:
        store.get("collated")
    with pytest.raises(UsageError, match=r"size: .*2.*3"):
        run.step(rows_of(2), telling, 2 + dist.get_rank())
    loss = run.step(rows_of(2), telling, 2).loss  # nothing is left of the other
    return [*events, f"{loss:.6f}"]


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_rows_are_collated_while_the_ranks_agree(way: str) -> None:
    first, second = run_ranks(takes_a_step_after_another_has_begun_one, 2, way)
    assert first[-1] == second[-1] and set(first[:-1]) == {"collated"}


def refuses_a_size() -> tuple[int, int]:
    """The size that recovery works with, before and after a size that only this rank was called with."""
    run = Trained("fsdp")
    for _ in range(3):
        run.step(rows_of(4), collate, 4)
    recovery = run.step._runner.recovery
    assert recovery is not None and recovery.shrink()
    before = run.step._runner.size
    with pytest.raises(UsageError, match="size: 2 on one rank and 4 on another"):
        run.step(rows_of(4), collate, 2 if dist.get_rank() else 4)
    return before, run.step._runner.size


@pytest.mark.ranks
def test_a_size_that_is_refused_leaves_recovery_as_it_is() -> None:
    assert run_ranks(refuses_a_size, 2) == [(2, 2), (2, 2)]


def open_here() -> tuple[int, int, int]:
    """The process groups, threads and open files of this process."""
    gc.collect()
    return len(groups_here()), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def opened_by_steps(way: str) -> list[tuple[int, int, int]]:
    """What is open after each of some steps that were made, taken, and dropped."""
    opened = []
    mesh = init_device_mesh("cpu", (2,)) if way == "context" else None
    for number in range(4):
        run = Trained("ddp" if way == "ddp" else "fsdp", timeout=30.0 + number, context_mesh=mesh)
        run.step(rows_of(2), collate, 1)
        del run
        opened.append(open_here())
    return opened


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["ddp", "fsdp", "context"])
def test_steps_that_are_dropped_leave_no_group_thread_or_file_behind(way: str) -> None:
    for _, second, *later in run_ranks(opened_by_steps, 2, way):
        assert all(each == second for each in later)


def has_each_timeout() -> list[Any]:
    """How long ranks wait for one that does not come, of those that share a group."""
    short, long = Ranks(timeout=1), Ranks(timeout=60)
    seen: list[Any] = [short._group is long._group, long.any(False), short.any(False)]
    if short.is_zero:
        started = time.monotonic()
        with pytest.raises(RankLost, match="answered for 1 s"):
            short.any(False)
        seen.append(time.monotonic() - started < 20)
    else:
        time.sleep(3)
        with pytest.raises(RankLost):
            long.any(False)
    return [*seen, Ranks(timeout=60).any(dist.get_rank() == 1)]  # in a group that works


@pytest.mark.ranks
def test_ranks_that_share_a_group_wait_as_long_as_each_is_told() -> None:
    first, second = run_ranks(has_each_timeout, 2)
    assert (first, second) == ([True, False, False, True, True], [True, False, False, True])
