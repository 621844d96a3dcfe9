"""Time and memory of one model's steps with other values of its knobs: traced, or estimated from few traces.

Steps that repeat less follow from the one that repeats everything, by leaving operations out, and the other
knobs are taken to add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torchtune_adaptive.core import Choice, knobs
from torchtune_adaptive.planner.memory.peak import DeviceLimits, peak
from torchtune_adaptive.planner.memory.recorded_step import RecordedStep
from torchtune_adaptive.planner.speed.operations import (
    ATTENTION,
    ELSEWHERE,
    GEMM,
    Operation,
    StepOperations,
)
from torchtune_adaptive.planner.speed.replay import host_seconds_to_repeat, step_time
from torchtune_adaptive.planner.speed.roofline import seconds as seconds_of
from torchtune_adaptive.planner.speed.speed import Pace
from torchtune_adaptive.planner.traced_run import StepsOfAnySize, operations_of

_OFFLOADING_COSTS = 1.05
"""Factor, an estimate; a candidate that offloads is traced before it is chosen."""


class StepsOfAnyChoice(StepsOfAnySize, Protocol):
    """The steps of one run on one rank, with any choice of its knobs."""

    def step(
        self, rows: int, length: int, choice: Choice | None = None, micro_batches: int | None = None
    ) -> RecordedStep: ...

    def noted(
        self, rows: int, length: int, choice: Choice | None = None, micro_batches: int | None = None
    ) -> RecordedStep: ...


@dataclass(frozen=True)
class TracedStep:
    """Seconds and bytes of a step, from a trace of it."""

    choice: Choice
    seconds: float
    reserved: int


class StepsByChoice:
    """The steps of one model with other values of its switches: traced, or estimated.

    Of the ``choices``, which are the candidates, the model's own is the first; ``rows`` are those of its own
    micro-batch, and ``rows_per_step`` those of each rank in a step.
    """

    def __init__(
        self,
        traces: StepsOfAnyChoice,
        choices: Sequence[Choice],
        *,
        rows: int,
        length: int,
        rows_per_step: int,
        device: DeviceLimits,
        pace: Pace,
    ) -> None:
        self._traces, self._own = traces, choices[0]
        self._rows, self._length, self._rows_per_step = rows, length, rows_per_step
        self._device, self._pace = device, pace
        sizes = {one.get(knobs.MICRO_BATCH) for one in choices}
        self.many_sizes = len(sizes) > 1
        """Whether there are candidates with other micro-batches."""
        self._beginning = traces.start_up(length)
        self._bases: dict[tuple[Any, ...], tuple[StepOperations, float]] = {}
        self.leanest: list[TracedStep] = []
        """Steps that repeat all they can, where they had to be traced."""
        self._exact: dict[Choice, TracedStep] = {}

    def traced(self, choice: Choice) -> TracedStep:
        """Seconds and bytes of a step, from a trace of that very step."""
        if choice not in self._exact:
            size, length = self._size(choice), self._length
            micro_batches = self._rows_per_step // size
            which = (size, length, choice, min(2, micro_batches))
            step = self._traces.step(*which)
            reserved = peak(self._beginning, step, size, length, self._device).reserved
            operations = self._traces.noted(*which).operations
            assert operations is not None
            seconds = self._replayed(operations, micro_batches)
            self._exact[choice] = TracedStep(choice, seconds, reserved)
        return self._exact[choice]

    def has_own_size(self, choice: Choice) -> bool:
        """Whether it has the micro-batch that the model's own choice has."""
        return self._size(choice) == self._size(self._own)

    def _size(self, choice: Choice) -> int:
        return int(choice.get(knobs.MICRO_BATCH, self._rows))

    def _replayed(self, step: StepOperations, micro_batches: int) -> float:
        pace = self._pace
        time = step_time(step, pace.speeds, pace.ranks, micro_batches, pace.compiled)
        return time.seconds * (pace.correction or 1.0)

    def ranked(self, candidates: list[Choice]) -> tuple[list[Choice], dict[Choice, float]]:
        """The candidates from the one that should be fastest, and the seconds of each."""
        estimated = {one: self.estimated_seconds(one) for one in candidates}
        return sorted(candidates, key=lambda one: estimated[one]), estimated

    def estimated_seconds(self, choice: Choice) -> float:
        """The seconds that a step should take."""
        size = self._size(choice)
        # Only a loss in chunks can be repeated, so what is not repeated depends on the loss.
        step, lean = self._base(size, *self._changed(choice, knobs.LOSS))
        found = lean - self._rows_per_step // size * self._not_repeated(step, choice)
        if change := self._changed(choice, knobs.RESHARD):
            found += self._base(size, *change)[1] - self._base(size)[1]
        return found * (_OFFLOADING_COSTS if choice.get(knobs.OFFLOADING) else 1.0)

    def _changed(self, choice: Choice, key: str) -> tuple[Any, ...]:
        """The knob and its value, if it is not the config's own."""
        return (key, choice[key]) if choice.get(key) != self._own.get(key) else ()

    def _base(self, size: int, *change: Any) -> tuple[StepOperations, float]:
        """The step that repeats all it can, with at most one other knob changed; and its seconds."""
        if (size, *change) not in self._bases:
            choice = self._own | {knobs.CHECKPOINT: "all"} | dict([change] if change else [])
            if knobs.RECOMPUTE_LOSS in choice:
                in_chunks = "Chunked" in str(choice.get(knobs.LOSS, "Chunked"))
                choice |= {knobs.RECOMPUTE_LOSS: in_chunks}
            if choice.get(knobs.OFFLOADING):
                choice |= {knobs.OFFLOADING: False}
            if not self.many_sizes:
                self.leanest.append(self.traced(choice))
            count = 2 if self.many_sizes else min(2, self._rows_per_step // size)
            step = operations_of(
                lambda rows: self._traces.noted(rows, self._length, choice, count),
                size,
                apart=not self.many_sizes,
            )
            self._bases[size, *change] = (step, self._replayed(step, self._rows_per_step // size))
        return self._bases[size, *change]

    def _not_repeated(self, step: StepOperations, choice: Choice) -> float:
        """Seconds of a micro-batch's operations that the step repeats, and the choice does not."""
        pace = self._pace
        last = step.micro_batches[-1]
        not_repeated = [one for one in last if one.repeats and not _repeats(one, choice)]
        saved = sum(seconds_of(one, pace.speeds, pace.ranks, pace.compiled) for one in not_repeated)
        if pace.speeds.is_host:  # elsewhere the device is busy meanwhile
            saved += host_seconds_to_repeat(last, pace.speeds, False)
            repeated = (one for one in last if not one.repeats or _repeats(one, choice))
            by_operation = choice[knobs.CHECKPOINT] == "operations"
            saved -= host_seconds_to_repeat(repeated, pace.speeds, by_operation)
        return (pace.correction or 1.0) * saved

    def estimated_peak(self, choice: Choice, traced: Iterable[TracedStep]) -> float | None:
        """The peak, if it lies between two that are known: of a step that keeps more layers' activations and
        is otherwise the same, and of one that keeps fewer."""
        if (kept := _kept(choice)) is None:
            return None
        more, fewer = [], []
        for one in (*self.leanest, *traced):
            if (share := _kept(one.choice)) is None:
                continue
            if share < kept:
                if _differ_only_in(one.choice, choice, knobs.CHECKPOINT, knobs.RECOMPUTE_LOSS):
                    fewer.append((share, one.reserved))
            elif _differ_only_in(one.choice, choice, knobs.CHECKPOINT):
                more.append((share, one.reserved))
        if not more or not fewer:
            return None
        (high, most), (low, least) = min(more), max(fewer)
        return least + (most - least) * (kept - low) / (high - low)


def _differ_only_in(one: Choice, other: Choice, *keys: str) -> bool:
    return all(one[key] == value or key in keys for key, value in other.items())


def _repeats(one: Operation, choice: Choice) -> bool:
    """Whether a step with this choice has an operation of the one that repeats all it can."""
    if one.repeats == ELSEWHERE:
        return bool(choice.get(knobs.RECOMPUTE_LOSS, True))
    if choice[knobs.CHECKPOINT] == "operations":
        return one.kind not in (GEMM, ATTENTION)
    return knobs.is_checkpointed(choice[knobs.CHECKPOINT], one.repeats)


def _kept(choice: Choice) -> float | None:
    """The share of layers whose activations are kept, if each is kept as a whole or not."""
    if choice[knobs.CHECKPOINT] == "operations":
        return None
    return float(1 - knobs.checkpointed_share(choice[knobs.CHECKPOINT]))
