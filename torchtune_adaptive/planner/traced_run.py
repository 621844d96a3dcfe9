"""The peaks of a run's steps at any size, computed from as few traces as possible.

What every plan is made of, whosever step it is, is a question about a step and its answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from torchtune_adaptive.common import counted, largest
from torchtune_adaptive.planner.memory.peak import (
    DOES_NOT_FIT,
    DeviceLimits,
    Peak,
    StartUp,
    replayed,
    runs_with_retries,
)
from torchtune_adaptive.planner.memory.recorded_step import (
    Bilinear,
    NotRegular,
    RecordedStep,
)
from torchtune_adaptive.planner.other_lengths import (
    FromOtherLengths,
    KnownSteps,
    StepsByLength,
    first_size,
)
from torchtune_adaptive.planner.speed.operations import DifferentOperations, StepOperations, at_rows
from torchtune_adaptive.planner.speed.speed import Pace, Speed
from torchtune_adaptive.planner.told import tell

_CLOSE = 0.002
"""Share of its peak by which a compiled step may differ from what is computed of others."""
_CORRECTIONS = 5
"""How often a guess of the largest size is corrected, where each size takes a trace."""


@dataclass(frozen=True)
class Question:
    """What a step takes on a device, how fast it is, and what fits there."""

    device: DeviceLimits
    rows: int | None
    """The rows of a micro-batch; None for the largest that fits."""
    length: int
    """The tokens in a row, as traces have them."""
    micro_batches: int = 1
    """Their number in a step."""
    pace: Pace | None = None
    """Pace that the speed follows from, if that is known."""
    ceiling: int | None = None
    """The largest micro-batch to consider."""
    confirmed: bool = False
    """Whether to trace the largest size itself, as a check of the way it was computed."""
    tokens: int | None = None
    """The tokens in a row, for the speed, where traces do not know them."""


@dataclass(frozen=True)
class Answer:
    """The answer for one device."""

    device: DeviceLimits
    peak: Peak
    """Peak at the micro-batch that was asked for."""
    largest: int
    """Largest micro-batch that fits; 0 if none does."""
    speed: Speed | None
    """Speed at the micro-batch that was asked for, whether it fits or not."""
    verdict: str
    as_written: str = ""
    """The reason why something that is compiled was predicted as it is written; empty if nothing was."""

    @property
    def fits(self) -> bool:
        """Whether it may fit, as far as is known."""
        return self.verdict != DOES_NOT_FIT


class StepsOfAnySize(KnownSteps, Protocol):
    """The steps of one run on one rank."""

    @property
    def compiled(self) -> bool:
        """Whether steps are as a compiler makes them. Then they are nearly bilinear, and no more."""
        ...

    @property
    def as_written(self) -> str:
        """The reason why something that is compiled was traced as it is written; empty if nothing was."""
        ...


def operations_of(
    noted: Callable[[int], RecordedStep],
    rows: int,
    apart: bool = False,
    sizes: tuple[int, int] | None = None,
) -> StepOperations:
    """The operations of a step of so many rows, from traces by their number: of this very step (``apart``, or
    if nothing else tells), or of the two ``sizes``, by default ``TracedRun.ROWS``."""

    def operations(rows: int) -> StepOperations:
        found = noted(rows).operations
        assert found is not None  # all but first steps have them
        return found

    few, many = sizes or TracedRun.ROWS
    if not apart and rows >= few:
        share = (rows - few) / (many - few)
        with suppress(DifferentOperations):
            return at_rows(operations(few), operations(many), share)
    return operations(rows)


class TracedRun:
    """The peaks of one run, where most queries are about rows of one ``length``; ``any_length`` says whether
    others will be about other lengths. ``rows`` are the two numbers of rows that are traced, if steps follow
    from those of ``ROWS`` only in part. Where each size is traced separately, the largest is found to a
    ``tolerance``, as a share of the memory. ``searches`` says whether the run searches before it trains; see
    Note [First steps] in ``planner.memory.peak``."""

    ROWS: ClassVar = (2, 3)
    """Rows of the steps that are traced. Not 1: with one row torch takes different code paths."""
    COMPILED_ROWS: ClassVar = (11, 13)
    """The same of compiled steps. There a buffer is used again for another one of its size, so there must not
    be as many tokens as a layer is wide."""

    first_size = staticmethod(first_size)

    def __init__(
        self,
        traces: StepsOfAnySize,
        length: int,
        any_length: bool = False,
        rows: tuple[int, int] | None = None,
        searches: bool = True,
        tolerance: float = 0.0,
    ) -> None:
        self._traces, self.searches, self._tolerance = traces, searches, tolerance
        self._steps: StepsByLength = traces if traces.compiled else FromOtherLengths(traces)
        self._rows = rows or (self.COMPILED_ROWS if traces.compiled else self.ROWS)
        self._least = (rows or self.ROWS)[0]
        self._beginning = self._steps.start_up(length)
        self._structures: dict[int, Bilinear] = {}
        self._every: Bilinear | None = None
        self._known: dict[tuple[object, ...], Peak] = {}
        self._replays: dict[tuple[object, ...], Peak] = {}
        self._beginnings: dict[tuple[int, int], StartUp] = {}
        self.direct = False
        """Whether steps are not bilinear, so that each size is traced separately."""
        try:
            if any_length:
                self._every = self._of_every_length(length)
            self._structure(length)
        except NotRegular:
            self.direct = True

    def after_search(self) -> TracedRun:
        """The same run if it searches before it trains."""
        other = copy(self)  # which shares what has been traced and replayed
        other.searches = True
        return other

    @property
    def any_length(self) -> bool:
        """Whether steps of every length follow from the traces."""
        return self._every is not None and not self.direct

    def answer(self, question: Question) -> Answer:
        """The largest micro-batch that fits; the peak, the speed and the verdict at what is asked for."""
        length, device = question.length, question.device
        largest = self.largest(length, device, question.ceiling, question.confirmed)
        rows = question.rows or largest or 1
        peak = self.peak(rows, length, device)
        speed, verdict = self.speed(question, rows), peak.verdict(device)
        return Answer(device, peak, largest, speed, verdict, self._traces.as_written)

    def speed(self, question: Question, rows: int) -> Speed | None:
        """The speed with micro-batches of so many rows, if the question has a pace."""
        if question.pace is None:
            return None
        step = self.operations(rows, question.length)
        pace = replace(question.pace, dtype=question.pace.dtype or step.dtype)
        if pace.speeds.peak(pace.dtype) is None:
            return None
        return pace.speed(step, rows, question.tokens or question.length, question.micro_batches)

    def largest(
        self, length: int, device: DeviceLimits, ceiling: int | None = None, confirmed: bool = False
    ) -> int:
        """The largest micro-batch that fits, and is no larger than a ceiling. It may be ``confirmed`` by a
        trace of that very size."""
        most = ceiling or sys.maxsize

        def reserved(rows: int) -> int:
            return self._replayed(rows, length, device).reserved

        few, many = self._least, 4 * self._least
        low = reserved(few)
        if few == 2 and low > device.usable_bytes:  # then it is 1 or 0
            return 1 if reserved(1) <= device.usable_bytes else 0
        high = reserved(many)
        each = max(1, (high - low) // (many - few))
        guess = min(most, many + (device.usable_bytes - high) // each)
        if guess > many:  # memory is only piecewise linear: correct the slope at the far end
            end = reserved(guess)
            guess -= (end - device.usable_bytes) * (guess - many) // max(1, end - high)
            guess = min(most, guess)
        if self.direct and self._tolerance and guess > many:
            return self._nearly_largest(guess, (many, high), most, device, reserved)
        found = largest(lambda rows: rows <= most and reserved(rows) <= device.usable_bytes, guess)
        if not confirmed or found < few or self.direct:
            return found
        traced = self._traces.step(found, length).renumbered()
        if self._agree(traced, self._structure(length).step(found, length)):
            return found
        if self._steps is not self._traces:  # perhaps because of what follows from other lengths
            self._rely_on_traces(length)
            return self.largest(length, device, ceiling, confirmed)
        self.direct = True
        return self.largest(length, device, ceiling)

    def _nearly_largest(
        self,
        rows: int,
        below: tuple[int, int],
        most: int,
        device: DeviceLimits,
        reserved: Callable[[int], int],
    ) -> int:
        """A size that fits, if only just: from a guess, and what a smaller size takes."""
        usable, (best, taken) = device.usable_bytes, below
        for _ in range(_CORRECTIONS):
            found = reserved(rows)
            each = max(1, (found - taken) // max(1, rows - best))
            if found <= usable:
                best, taken = rows, found
                if rows == most or usable - found < max(each, self._tolerance * usable):
                    break
            rows = min(most, rows + (usable - found) // each)
            if rows <= best:
                break
        return best

    def _rely_on_traces(self, length: int) -> None:
        """Trace what followed from other lengths, which has turned out to be wrong."""
        self._steps = self._traces
        self._beginning = self._traces.start_up(length)
        self._structures.clear()
        self._known.clear()
        self._replays.clear()
        self._beginnings.clear()
        self._every = None

    def _agree(self, traced: RecordedStep, computed: RecordedStep) -> bool:
        if not self._traces.compiled:
            return traced.events == computed.events
        most, expected = traced.most_in_use(), computed.most_in_use()
        return abs(most - expected) <= _CLOSE * most

    def peak(self, rows: int, length: int, device: DeviceLimits) -> Peak:
        """The peak of a step."""
        size = (rows, length, device, self.direct, self.searches)
        if size not in self._known:
            found = self._replayed(rows, length, device)
            retries = found.verdict(device) == DOES_NOT_FIT and runs_with_retries(
                found, self._before(rows, length), self._step(rows, length), device
            )
            self._known[size] = replace(found, with_retries=retries)
        return self._known[size]

    def _replayed(self, rows: int, length: int, device: DeviceLimits) -> Peak:
        """The same without what depends on how much memory there is. Each size is replayed once: that takes
        a tenth of a second."""
        size = (rows, length, device.as_replayed, self.direct, self.searches)
        if size not in self._replays:
            step = self._step(rows, length)
            tell(f"replaying the allocations of {counted(rows, 'row')}")
            beginning = self._before(rows, length)
            self._replays[size] = replayed(beginning, step, rows, length, device)
        return self._replays[size]

    def _before(self, rows: int, length: int) -> StartUp:
        """What precedes a step."""
        if self.searches:
            return self._beginning
        alike = rows if self._is_traced(rows) else 0, length
        if alike not in self._beginnings:
            step = self._step(rows, length)
            self._beginnings[alike] = self._beginning.without_search(step)
        return self._beginnings[alike]

    def operations(self, rows: int, length: int) -> StepOperations:
        """The operations of a step, with what they compute and move."""
        apart = self.direct or self._traces.compiled  # from the steps whose memory is known
        return operations_of(lambda rows: self._steps.noted(rows, length), rows, apart, self._rows)

    def _is_traced(self, rows: int) -> bool:
        """Whether a step of so many rows is traced itself, and does not follow from others."""
        return self.direct or rows < self._least

    def _step(self, rows: int, length: int) -> RecordedStep:
        if self._is_traced(rows):
            return self._steps.step(rows, length)
        return self._structure(length).step(rows, length)

    def _structure(self, length: int) -> Bilinear:
        if length not in self._structures:
            self._structures[length] = self._every or self._of_lengths(length)
        return self._structures[length]

    def _of_lengths(self, *lengths: int) -> Bilinear:
        return Bilinear({(r, n): self._steps.step(r, n) for r in self._rows for n in lengths})

    def _of_every_length(self, length: int) -> Bilinear | None:
        """Steps of any length, if a third length matches the prediction from two; else None, and each length
        needs its own traces: attention that keeps its weights, for example, is quadratic in the length."""
        if length < 8:
            return None
        every = self._of_lengths(length // 2, length)
        few, third = self._rows[0], length // 4
        traced = self._steps.step(few, third).renumbered()
        return every if self._agree(traced, every.step(few, third)) else None
