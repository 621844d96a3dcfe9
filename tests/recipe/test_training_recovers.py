"""Training in which memory runs out: the step is retried, smaller, and nothing else changes."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.helpers.decoder import same_bits
from tests.helpers.faults import OutOfMemoryAt, fail_at_each
from tests.helpers.loops import Sizes, Training
from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.samples import Sample
from torchtune_adaptive.common.errors import OutOfMemoryElsewhere, TrainingOutOfMemory
from torchtune_adaptive.core.ranks.watchdog import EXIT_CODE, Watchdog
from torchtune_adaptive.core.sizes.recovery import Recovery
from torchtune_adaptive.core.step.knobs import CHECKPOINT
from torchtune_adaptive.recipe.train.history import MarkKind

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]


def fail_everywhere(sample: Sample, relieves: bool, settings: dict[str, Any]) -> Counter[str]:
    """Fail at operations of the first step, where more checkpointing is left to do, or is not."""
    training = Training(rows=4, micro_batch=2, switches=relieves, **settings)
    unharmed = training.run(Recovery(2, (1, 2), None, reliefs=int(relieves)))
    smaller = training.run(Sizes([1]))
    assert not same_bits(unharmed.parameters, smaller.parameters)
    counts: Counter[str] = Counter()
    operations = sample.of(training.survivable())
    for _, _, failure in fail_at_each(operations, training.memory, training.ranks):
        with failure:
            trained = training.run(Recovery(2, (1, 2), None, reliefs=int(relieves)))
        shrunk = trained.sizes != unharmed.sizes
        expected = smaller if shrunk else unharmed
        counts["tried"] += 1
        counts["redone"] += trained.redone
        counts["smaller"] += shrunk
        counts["wrong"] += not (
            same_bits(trained.parameters, expected.parameters)
            and trained.losses == expected.losses
            and trained.rates == expected.rates
            and trained.sizes == expected.sizes
            and trained.taken == expected.taken
        )
    return counts


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_at_every_operation_of_a_step(lora: bool, sample: Sample) -> None:
    settings = {"steps": 1, "lora": lora}
    for count in run_ranks(fail_everywhere, 2, sample, False, settings, timeout=900):
        assert count["wrong"] == 0
        assert count["tried"] >= 300 // sample.stride
        assert count["redone"] == count["smaller"] == count["tried"]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(3, {"layers": 2}, id="three ranks", marks=pytest.mark.exhaustive),
        pytest.param(1, {"sharded": False}, id="one rank"),
        pytest.param(2, {"reshard": False, "output_apart": True}, id="not resharded, output apart"),
    ],
)
def test_other_kinds_of_run_at_a_sample_of_operations(
    ranks: int, settings: dict[str, Any], sample: Sample
) -> None:
    settings = {"steps": 3, "dropout": 0.1, **settings}
    sample = sample.every(exhaustive=29, quick=101)
    for count in run_ranks(fail_everywhere, ranks, sample, False, settings, timeout=600):
        assert count["wrong"] == 0
        assert count["redone"] == count["smaller"] == count["tried"] >= 300 // sample.stride


RELIEVED: dict[str, tuple[int, dict[str, Any]]] = {
    "full": (2, {"steps": 2}),
    "two layers": (2, {"steps": 2, "layers": 2}),
    "lora": (2, {"steps": 1, "lora": True}),
    "one rank": (1, {"steps": 2, "sharded": False}),
    "output apart": (2, {"steps": 1, "reshard": False, "output_apart": True}),
}


@pytest.mark.rotating
@pytest.mark.parametrize("kind", RELIEVED)
def test_with_more_checkpointing_a_disturbed_run_keeps_its_bits(kind: str, sample: Sample) -> None:
    ranks, settings = RELIEVED[kind]
    settings = {"dropout": 0.1, **settings}
    if kind == "two layers":
        sample = sample.every(exhaustive=7, quick=101)
    for count in run_ranks(fail_everywhere, ranks, sample, True, settings, timeout=900):
        assert count["wrong"] == 0
        assert count["redone"] == count["tried"] >= 300 // sample.stride
        # In the norm of the gradients, activations are not the peak, and micro-batches shrink.
        assert count["smaller"] <= count["tried"] * 0.1 + 2


def fail_again_and_again(folder: Path, failures: int, checkpointing: str) -> dict[str, Any]:
    """Fail at the start of each attempt, until so many have failed."""
    training = Training(rows=4, micro_batch=2, steps=1, switches=True, layers=3)
    training.switched |= {CHECKPOINT: checkpointing}
    counted = {"left": 0}

    class Always(OutOfMemoryAt):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if counted["left"] and all(
                kind in (torch.Tensor, torch.nn.Parameter) for kind in types
            ):
                counted["left"] -= 1
                raise torch.OutOfMemoryError("injected")
            return func(*args, **(kwargs or {}))

    unharmed = training.run(Recovery(2, (1, 2), None, reliefs=1))
    counted["left"] = failures
    training.memory.fault = Always(0)
    trained = training.run(Recovery(2, (1, 2), None, reliefs=1), folder=folder)
    lines = (folder / "batch_size_events.jsonl").read_text().splitlines()
    return {
        "events": [json.loads(line) for line in lines],
        "same": same_bits(trained.parameters, unharmed.parameters),
        "size": trained.sizes,
        "marks": trained.history.marks,
    }


@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("before", ["none", "1_of_3"])
def test_what_is_given_up_in_which_order_and_what_is_said(
    before: str, failures: int, tmp_path: Path
) -> None:
    (seen,) = run_ranks(fail_again_and_again, 1, tmp_path, failures, before)
    changes = [
        {key: event[key] for key in event if key not in ("step", "reason")}
        for event in seen["events"]
    ]
    assert all("out of memory in forward on rank 0" in event["reason"] for event in seen["events"])
    assert (
        changes
        == [
            {"activation_checkpointing": [before, "all"]},
            {"micro_batch": [2, 1], "accumulation": [2, 4]},
        ][:failures]
    )
    assert (seen["same"], seen["size"]) == ((True, [2]) if failures < 2 else (False, [1]))
    marks = seen["marks"]
    assert (
        marks[MarkKind.RETRIED] == [(4, "step 1 retried")] * failures
        and not marks[MarkKind.RESUMED]
    )
    assert (
        marks[MarkKind.CHANGED]
        == [
            (4, f"from step 1: activation checkpointing {before} -> all"),
            (4, "from step 1: micro-batch 2 -> 1; accumulation 2 -> 4"),
        ][:failures]
    )


def soak(steps: int, faults: float) -> dict[str, Any]:
    """Memory runs out now and then (in that share of the steps), anywhere, on any rank."""
    training = Training(rows=4, micro_batch=4, steps=steps, dropout=0.1)
    training.run(Sizes([4]))  # learns the sequence of collectives
    operations = training.survivable()
    fate = random.Random(1)  # the same on every rank
    resident: list[int] = []

    def arm(step: int) -> None:
        training.memory.fault = None
        recovery._wait = 2  # or it would soon have learnt to stay small
        if step % (steps // 10) == 0:
            resident.append(psutil.Process().memory_info().rss)
        if fate.random() < faults and recovery.size > 1:
            operation, victim = fate.randrange(1, operations), fate.randrange(training.ranks.size)
            training.memory.arm(operation if victim == training.ranks.rank else None)

    recovery = Recovery(4, (1, 2, 3, 4), calm_steps=2)
    trained = training.run(recovery, arm)
    training.memory.fault = None
    reference = training.run(Sizes(trained.sizes))
    return {
        "redone": trained.redone,
        "sizes": set(trained.sizes),
        "same": same_bits(trained.parameters, reference.parameters),
        "same losses": trained.losses == reference.losses,
        "same samples": trained.taken == reference.taken,
        "samples": len(set(trained.taken)),
        "growth": resident[-1] - resident[len(resident) // 3],
    }


@pytest.mark.exhaustive
def test_a_thousand_steps_in_which_anything_may_fail(exhaustive: bool) -> None:
    steps, faults = (1000, 0.1) if exhaustive else (24, 0.5)
    for seen in run_ranks(soak, 2, steps, faults, timeout=900):
        assert seen["redone"] >= steps // 20 and seen["sizes"] == {1, 2, 4}
        assert seen["same"] and seen["same losses"] and seen["same samples"]
        assert seen["samples"] == 4 * steps
        assert seen["growth"] < 20 << 20


def thrash(retries: dict[int, int], micro_batch: int, folder: str) -> tuple[list[int], list[Any]]:
    """Sizes and events of a run in which rank 1's allocator has had to retry before some steps."""
    training = Training(rows=4, micro_batch=micro_batch, steps=8)

    def retry(step: int) -> None:
        training.memory.retried += retries.get(step, 0) if training.ranks.rank == 1 else 0

    trained = training.run(Recovery(micro_batch, (1, 2, 4), calm_steps=3), retry, Path(folder))
    unharmed = training.run(Sizes(trained.sizes))
    assert same_bits(trained.parameters, unharmed.parameters) and trained.redone == 0
    rows = (Path(folder) / "batch_size_events.jsonl").read_text() if training.ranks.rank else ""
    return trained.sizes, [json.loads(row) for row in rows.splitlines()]


def test_an_isolated_retry_changes_nothing_two_in_a_row_lower_the_next_step(tmp_path: Path) -> None:
    (sizes, _), (other_sizes, events) = run_ranks(thrash, 2, {0: 3, 2: 1, 3: 5}, 4, str(tmp_path))
    assert sizes == other_sizes == [4, 4, 4, 4, 2, 2, 2, 4]
    assert events[0]["step"] == 5 and events[0]["micro_batch"] == [4, 2]
    assert "two consecutive steps" in events[0]["reason"] and events[0]["accumulation"] == [1, 2]
    assert events[-1]["reason"] == "no OOM for 3 steps"


def test_at_size_one_thrashing_is_a_warning(tmp_path: Path) -> None:
    (sizes, _), (_, events) = run_ranks(thrash, 2, {2: 1, 3: 1}, 1, str(tmp_path))
    assert sizes == [1] * 8
    assert any("cannot shrink" in event["reason"] for event in events)


def cannot_go_on(what: str) -> str:
    """A failure that ends training; what it says on this rank."""
    training = Training(rows=2, micro_batch=1, steps=3)
    training.run(Sizes([1]))
    operations = training.survivable()

    def always(step: int) -> None:
        training.memory.arm(operations // 2)

    def no_room(name: str, last: bool) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if what == "saving":
        with pytest.raises(OutOfMemoryElsewhere) as raised:
            training.run(Recovery(1, (1,), None), save=no_room)
        return str(raised.value)
    recovery = Recovery(1, (1,), None) if what == "size one" else None
    with pytest.raises(TrainingOutOfMemory) as raised:
        training.run(recovery, always)
    return str(raised.value)


def test_size_one_is_the_end() -> None:
    for said in run_ranks(cannot_go_on, 2, "size one"):
        assert "Step 1 in micro-batches of 1 row: out of memory in forward on ranks 0 and 1" in said
        assert "none has been saved yet" in said and "shorter rows" in said


class Phases(Watchdog):
    """Keeps the phases that it is told of."""

    def enter(self, phase: str, patience: float | None) -> None:
        self.entered = [*getattr(self, "entered", ()), phase]


def short_of_memory_for_a_moment(folder: str) -> tuple[bool, int, list[Any], list[str]]:
    training = Training(rows=2, micro_batch=1, steps=2)
    unharmed = training.run(Sizes([1]))
    operations = training.survivable()

    def once(step: int) -> None:
        if step == 1 and training.ranks.rank == 1:
            training.memory.arm(operations // 2)

    recovery, phases = Recovery(1, (1,), None), Phases(training.ranks, 20.0)
    trained = training.run(recovery, once, Path(folder), watchdog=phases, wait_for_memory=5)
    rows = (Path(folder) / "batch_size_events.jsonl").read_text().splitlines()
    same = same_bits(trained.parameters, unharmed.parameters)
    return same, trained.redone, [json.loads(row) for row in rows], phases.entered


def test_size_one_is_retried_when_memory_was_short_for_a_moment(tmp_path: Path) -> None:
    for same, retried, events, phases in run_ranks(short_of_memory_for_a_moment, 2, str(tmp_path)):
        assert same and retried == 1
        again = ["step 2 in micro-batches of 1 row"]
        assert phases[1:4] == [*again, "step 2, waiting for memory", *again]
        assert {event["step"] for event in events} == {2}
        assert " on rank 1" in events[0]["reason"]
        assert "retrying in 1 s" in events[0]["reason"]


def test_without_recovery_every_rank_stops_with_the_reason() -> None:
    for said in run_ranks(cannot_go_on, 2, "no recovery"):
        assert "Step 1 in micro-batches of 1 row: out of memory in forward on ranks 0 and 1" in said


def test_out_of_memory_while_saving_is_not_the_batchs_fault() -> None:
    for said in run_ranks(cannot_go_on, 2, "saving"):
        assert (
            "while saving the checkpoint epoch_0" in said and "batch size is not the cause" in said
        )


def half_applied() -> None:
    training = Training(rows=4, micro_batch=2, steps=4)
    training.run(Sizes([2]))
    operations = training.survivable()
    watchdog = Watchdog(training.ranks, limit=10.0)

    def fail_in_the_optimizer(step: int) -> None:
        if step == 1 and training.ranks.rank == 1:
            training.memory.arm(operations + 5)

    with watchdog:
        training.run(Recovery(2, (1, 2), None), fail_in_the_optimizer, watchdog=watchdog)


def test_out_of_memory_in_the_optimizer_stops_every_rank_and_says_so() -> None:
    survivor, victim = watch_ranks(half_applied, 2, until_exit_of=[0, 1])
    assert "Out of memory in the optimizer step of step 2" in victim.said
    assert "some parameters may have changed" in victim.said and "last checkpoint" in victim.said
    assert survivor.exit_code in (EXIT_CODE, 1) and "rank 1" in survivor.said
