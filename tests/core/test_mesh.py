"""Memory runs out anywhere in a step on a mesh: nobody waits, all discard it, and no bit changes."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.helpers.context_parallel import TORCHS
from tests.helpers.decoder import batch, local_values, same_bits
from tests.helpers.faults import fail_at_each, record_anew
from tests.helpers.mesh import (
    ROWS,
    OnMesh,
    context_of,
    fail_on_mesh,
    lengths_of,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import Sample
from torchtune_adaptive.core.private import unfinished_works
from torchtune_adaptive.core.step.phase import Phase

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]

Shape = tuple[int, int, int]
"""The ranks that hold the same shard, those that share the parameters, those that hold the same rows."""

TURNS = 7
"""The tests among which the operations of a step are divided, where memory runs out at every one."""

CASES: dict[str, tuple[str, Shape, str, str]] = {
    "tensor parallel": ("tensor", (1, 1, 2), "everything", "one rank"),
    "with FSDP, a new shape": ("tensor", (1, 2, 2), "shape", "one rank"),
    "sequence parallel, two ranks of a group": (
        "sequence",
        (1, 1, 2),
        "everything",
        "two of a group",
    ),
    "with FSDP": ("tensor", (1, 2, 2), "everything", "one rank"),
    "with FSDP, two ranks of a group, a new shape": (
        "tensor",
        (1, 2, 2),
        "shape",
        "two of a group",
    ),
    "with FSDP, while recording": ("tensor", (1, 2, 2), "nothing", "one rank"),
    "with FSDP, all ranks": ("tensor", (1, 2, 2), "shape", "all ranks"),
    "sequence parallel, with FSDP": ("sequence", (1, 2, 2), "shape", "one rank"),
    "loss parallel": ("loss", (1, 1, 2), "shape", "one rank"),
    "loss parallel, with FSDP": ("loss", (1, 2, 2), "everything", "two of a group"),
    "gathering metrics": ("gathering", (1, 1, 2), "shape", "one rank"),
    "gathering metrics, with FSDP": ("gathering", (1, 2, 2), "everything", "one rank"),
    "gathering metrics, a new shape": ("gathering", (1, 2, 2), "shape", "one rank"),
    "gathering metrics, two ranks of a group": ("gathering", (1, 2, 2), "shape", "two of a group"),
    "gathering metrics, while recording": ("gathering", (1, 2, 2), "nothing", "one rank"),
    "ring attention": ("ring", (1, 1, 2), "everything", "one rank"),
    "ring attention, a new shape": ("ring", (1, 2, 2), "shape", "one rank"),
    "balanced ring attention": ("balanced ring", (1, 2, 2), "everything", "two of a group"),
    "balanced ring attention, while recording": ("balanced ring", (1, 1, 2), "nothing", "one rank"),
    "gathered ring attention": ("gathered ring", (1, 2, 2), "shape", "two of a group"),
    "gathered ring attention, all ranks": ("gathered ring", (1, 2, 2), "shape", "all ranks"),
    "attention gathers by an operator": ("gathering operator", (1, 2, 2), "shape", "one rank"),
    "exchanged heads": ("exchanged heads", (1, 1, 2), "everything", "two of a group"),
    "exchanged heads, a new shape": ("exchanged heads", (1, 2, 2), "shape", "one rank"),
    "undeclared ring attention": ("undeclared ring", (1, 2, 2), "everything", "one rank"),
    "undeclared ring attention, a new shape": ("undeclared ring", (1, 1, 2), "shape", "one rank"),
    TORCHS: (TORCHS, (1, 1, 2), "everything", "one rank"),
    f"{TORCHS}, a new shape": (TORCHS, (1, 2, 2), "shape", "two of a group"),
    f"{TORCHS}, while recording": (TORCHS, (1, 1, 2), "nothing", "one rank"),
    "with HSDP": ("tensor", (2, 2, 2), "everything", "one rank"),
    "with HSDP, a new shape": ("tensor", (2, 2, 2), "shape", "one rank"),
}

COMPARED = ["tensor", "sequence", "loss", "ring", "balanced ring", "exchanged heads", TORCHS]
"""The ways in which a log is compared with that of whole rows."""


@pytest.mark.rotating(1)
@pytest.mark.parametrize(("way", "shape", "known", "who"), CASES.values(), ids=CASES)
def test_memory_runs_out_at_operations_of_a_step(
    way: str, shape: Shape, known: str, who: str, sample: Sample
) -> None:
    sample = sample.every(exhaustive=29, quick=67)
    _assert_survived(run_ranks(fail_on_mesh, math.prod(shape), way, shape, known, who, sample))


@pytest.mark.exhaustive
@pytest.mark.sweep
@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize(("way", "shape", "known", "who"), CASES.values(), ids=CASES)
def test_memory_runs_out_at_every_operation_of_a_step(
    way: str, shape: Shape, known: str, who: str, turn: int
) -> None:
    arguments = (way, shape, known, who, Sample(True, shard=turn, stride=TURNS))
    _assert_survived(run_ranks(fail_on_mesh, math.prod(shape), *arguments, timeout=600))


@pytest.mark.rotating(1)
@pytest.mark.parametrize("known", ["everything", "shape", "nothing"])
@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 2, 2), (2, 2, 2)], ids=str)
def test_memory_runs_out_before_and_after_each_launch(
    shape: Shape, known: str, sample: Sample
) -> None:
    sample = sample.every(exhaustive=1, quick=13)
    arguments = ("sequence", shape, known, "one rank", sample, True)
    _assert_survived(run_ranks(fail_on_mesh, math.prod(shape), *arguments, timeout=600))


def _assert_survived(ranks: list[dict[str, int]]) -> None:
    for counts in ranks:
        assert counts["tried"] == counts["lost"] == counts["blamed"] >= 1
        assert counts["wrong"] == counts["unequal"] == counts["unfinished"] == 0


def log_of(way: str, shape: Shape, data_ranks: int) -> list[tuple[float, ...]]:
    """What steps say, in which the rows of all data-parallel ranks are the same on every mesh."""
    with context_of(way, shape):
        run = OnMesh(way, shape)
        shares = data_ranks // (shape[0] * shape[1])
        said = []
        for number in range(4):
            for share in range(shares):
                rows = batch(2, seed=10 * number + run.place * shares + share)
                run.step.forward_backward(run.part_of(rows))
            outcome = run.step.apply()
            assert not outcome.lost and outcome.gradient_norm is not None
            said.append((outcome.weight, outcome.loss, outcome.gradient_norm))
        return said


@pytest.mark.rotating(1)
@pytest.mark.parametrize("way", COMPARED)
def test_the_log_is_that_of_one_rank(way: str) -> None:
    """Tokens count once, and gradients that are terms of a sum are summed before their norm."""
    [alone] = run_ranks(log_of, 1, "sequence", (1, 1, 1), 1)
    both = run_ranks(log_of, 2, way, (1, 1, 2), 1)
    assert both[0] == both[1]
    for expected, seen in zip(alone, both[0], strict=True):
        assert seen == pytest.approx(expected, rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", COMPARED)
def test_the_log_is_that_of_two_data_parallel_ranks(way: str) -> None:
    plain = run_ranks(log_of, 2, "sequence", (1, 2, 1), 2)
    four = run_ranks(log_of, 4, way, (1, 2, 2), 2)
    assert four == [four[0]] * 4
    for expected, seen in zip(plain[0], four[0], strict=True):
        assert seen == pytest.approx(expected, rel=1e-6)


def steps_of_any_length(way: str, shape: Shape, steps: int, chunks: int) -> dict[str, float]:
    """Steps whose rows have other lengths on each rank, and so other numbers of launches; every second one
    fails somewhere. It is taken again, and compared with one that did not fail."""
    with context_of(way, shape):
        run, reference = OnMesh(way, shape, chunks), OnMesh(way, shape, chunks)
        counts = {"lost": 0, "wrong": 0, "unequal": 0, "unfinished": 0}
        generator = torch.Generator().manual_seed(0)
        for number, length in enumerate(lengths_of(steps, seed=run.place)):
            rows = run.part_of(batch(ROWS, length, seed=1000 * number + run.place))
            operation = int(torch.randint(1, 430, (), generator=generator))
            victim = number // 2 % run.ranks.size
            fails = number % 2 == 1 and victim == run.ranks.rank
            with run.memory.fail_at(operation if fails else None):
                outcome = run.take(1, rows)
            if outcome.lost:
                counts["lost"] += 1
                outcome = run.take(1, rows)
            counts["unequal"] += not run.launched()
            counts["unfinished"] += unfinished_works()
            assert outcome == reference.take(1, rows)
            pairs = zip(local_values(run.model), local_values(reference.model), strict=True)
            counts["wrong"] += not all(torch.equal(*pair) for pair in pairs)
        return counts


@pytest.mark.parametrize("way", ["tensor", "ring", "undeclared ring", TORCHS])
@pytest.mark.parametrize(
    "steps", [6, pytest.param(300, marks=pytest.mark.exhaustive)], ids=["short", "long"]
)
def test_any_rank_may_meet_any_length_at_any_time(steps: int, way: str) -> None:
    arguments = (way, (1, 2, 2), steps, 8)
    for counts in run_ranks(steps_of_any_length, 4, *arguments, timeout=60 + 2 * steps):
        assert counts["lost"] == steps // 2
        assert counts["wrong"] == counts["unequal"] == counts["unfinished"] == 0


def fail_and_take_other_rows() -> Counter[str]:
    """Run out of memory at the first operations of a step, and go on with rows of the same shape."""
    run, reference = OnMesh("tensor", (1, 1, 2)), OnMesh("tensor", (1, 1, 2))
    for each in (run, reference):
        for _ in range(3):
            each.take(ROWS)
    counts: Counter[str] = Counter()
    for operation, _, failure in fail_at_each(range(1, 40), run.memory, run.ranks):
        with failure:
            counts["lost"] += run.take(ROWS).lost
        other = batch(ROWS, seed=operation)
        counts["different"] += run.take(ROWS, other) != reference.take(ROWS, other)
    return counts


@pytest.mark.rotating(1)
def test_other_rows_follow_a_step_that_was_lost_in_an_embedding() -> None:
    """torch masks the tokens of other ranks, and keeps the mask while the embedding is not whole."""
    for counts in run_ranks(fail_and_take_other_rows, 2):
        assert counts["lost"] == 39 and counts["different"] == 0


def steps_in_which_a_group_launches_more() -> Counter[str]:
    """Now and then one pair of ranks that hold the same rows has a collective more than the other pair."""
    run = OnMesh("tensor", (1, 2, 2))
    pair = run.mesh["tp"].get_group()
    more = False

    def launch(*_: object) -> None:
        if more and run.place == 0:
            dist.all_reduce(torch.zeros(1), group=pair)

    run.model.register_forward_pre_hook(launch)
    counts: Counter[str] = Counter()
    for number in range(24):
        more = number % 8 >= 4
        # The number is as before in what fails: it is recorded by then.
        fails = number % 4 == 3 and run.ranks.rank == number // 4 % run.ranks.size
        with run.memory.fail_at(100 if fails else None):
            counts["lost"] += run.take(1).lost
        counts["unequal"] += not run.launched()
        counts["recording"] += run.step.collectives.recording
    return counts


@pytest.mark.rotating(1)
def test_ranks_that_hold_the_same_rows_may_change_what_they_launch() -> None:
    pairs = run_ranks(steps_in_which_a_group_launches_more, 4)
    assert [each["lost"] for each in pairs] == [6] * 4
    assert [each["unequal"] for each in pairs] == [0] * 4
    assert pairs[0]["recording"] > pairs[2]["recording"]  # the others are not asked


def gradients_after_a_step() -> list[bool]:
    """Whether each gradient is placed as its parameter is, in a step that leaves them to the caller."""
    run = OnMesh("sequence", (1, 1, 2))
    placed = []
    scale = run.step._scale_gradients

    def look(factor: float) -> None:
        scale(factor)
        for parameter in run.model.parameters():
            assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
            placed.append(parameter.grad.placements == parameter.placements)

    run.step._scale_gradients = look  # type: ignore[method-assign]
    run.take(ROWS)
    return placed


@pytest.mark.exhaustive
def test_gradients_are_placed_as_their_parameters_are() -> None:
    for placed in run_ranks(gradients_after_a_step, 2):
        assert len(placed) > 10 and all(placed)


def fail_without_gradients(way: str, shape: Shape, known: str, sample: Sample) -> dict[str, int]:
    """Run out of memory in a validation of rows, on one rank after the other; train after each."""
    with context_of(way, shape):
        run, reference = OnMesh(way, shape), OnMesh(way, shape)
        for each in (run, reference):
            each.take(1)
        counts = dict.fromkeys(("tried", "lost", "wrong", "unequal", "unfinished"), 0)
        phase = Phase("validation", run.step, run.step.sums)
        expected = [phase.attempt(run.rows) for _ in range(3)][-1]
        assert not expected.lost
        with run.memory.fail_at(0) as fault:
            phase.attempt(run.rows)
        for _, _, failure in fail_at_each(sample.of(fault.seen), run.memory, run.ranks):
            if known == "nothing":
                record_anew(run.step.collectives)
            with failure:
                outcome = phase.attempt(run.rows)
            counts["tried"] += 1
            counts["lost"] += outcome.lost
            counts["unequal"] += not run.launched()
            counts["unfinished"] += unfinished_works()
            again = phase.attempt(run.rows)
            counts["wrong"] += again.lost or not torch.equal(again.result, expected.result)
        assert run.take(1) == reference.take(1)
        counts["wrong"] += not same_bits(local_values(run.model), local_values(reference.model))
        return counts


@pytest.mark.rotating(1)
@pytest.mark.parametrize("known", ["everything", "nothing"])
@pytest.mark.parametrize(
    ("way", "shape"),
    [
        *(
            ("tensor", (1, 1, 2)),
            ("sequence", (1, 2, 2)),
            ("loss", (1, 1, 2)),
            ("tensor", (1, 2, 2)),
        ),
        ("ring", (1, 2, 2)),
        (TORCHS, (1, 1, 2)),
    ],
    ids=str,
)
def test_memory_runs_out_at_operations_of_a_validation(
    way: str, shape: Shape, known: str, sample: Sample
) -> None:
    sample = sample.every(exhaustive=1, quick=17)
    arguments = (way, shape, known, sample)
    for counts in run_ranks(fail_without_gradients, math.prod(shape), *arguments):
        assert counts["lost"] == counts["tried"] > 0
        assert counts["wrong"] == counts["unequal"] == counts["unfinished"] == 0
