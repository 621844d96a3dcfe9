"""Steps with rows of other lengths, from those of three.

The sizes of a step's allocations are linear in the length of rows, and what its operations compute is at most
quadratic in it: attention compares all tokens with each other. So three lengths give every other, and of
memory the third tells whether it is so. A step that keeps a number for each pair of tokens, as a mask does,
has to be traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from torchtune_adaptive.planner.memory.peak import StartUp
from torchtune_adaptive.planner.memory.recorded_step import Bilinear, NotRegular, RecordedStep
from torchtune_adaptive.planner.speed.operations import (
    DifferentOperations,
    StepOperations,
    interpolated,
)

Size = tuple[int, int]
"""The rows of a micro-batch, and their length."""
UNIT = 64
"""What lengths are multiples of. Some kernels pad the length of rows, and some losses divide the tokens."""
FIRST_ROWS = 2
"""The rows of a run's first step."""
_LENGTHS = 3


class StepsByLength(Protocol):
    """Steps of one run."""

    def start_up(self, length: int) -> StartUp: ...

    def step(self, rows: int, length: int) -> RecordedStep: ...

    def noted(self, rows: int, length: int) -> RecordedStep:
        """Such a step with its operations, as it is written."""
        ...


class KnownSteps(StepsByLength, Protocol):
    """The same, where some take no trace."""

    @property
    def max_seq_len(self) -> int | None:
        """The longest rows that the model takes, if it bounds them."""
        ...

    def known(self) -> Mapping[Size, RecordedStep]:
        """Later steps that take none."""
        ...

    def known_first(self) -> Mapping[Size, StartUp]:
        """First steps that take none, with what precedes them."""
        ...


class FromOtherLengths:
    """The same steps; one that follows from those of other lengths is not traced."""

    def __init__(self, steps: KnownSteps) -> None:
        self._steps = steps
        self._computed: dict[Size, RecordedStep] = {}

    def start_up(self, length: int) -> StartUp:
        size = first_size(length)
        known, beginnings = self._steps.known(), self._steps.known_first()
        if size not in beginnings and self._follows(*size):
            here = self.step(*size)
            for other in beginnings.keys() & known.keys():
                with suppress(NotRegular):
                    first = first_step_like(beginnings[other].first_step, known[other], here)
                    return StartUp(beginnings[other].set_up, first)
        return self._steps.start_up(length)

    def step(self, rows: int, length: int) -> RecordedStep:
        if self._follows(rows, length):
            return self._computed.get((rows, length)) or self._steps.known()[rows, length]
        return self._steps.step(rows, length)

    noted = step

    def _follows(self, rows: int, length: int) -> bool:
        """Whether a step is known, or follows from others."""
        known = self._steps.known()
        if (rows, length) in known or (rows, length) in self._computed:
            return True
        if length > (self._steps.max_seq_len or length):
            return False
        with suppress(NotRegular):
            by_length = {n: step for (r, n), step in known.items() if r == rows}
            self._computed[rows, length] = at_length(by_length, length)
        return (rows, length) in self._computed


def first_size(length: int) -> Size:
    """The size of a run's first step, which has as many tokens as one row of this length, as in a search."""
    return FIRST_ROWS, max(1, length // FIRST_ROWS)


def at_length(known: Mapping[int, RecordedStep], length: int) -> RecordedStep:
    """The step with rows of this length, from those that are ``known`` by theirs.

    Raises:
        NotRegular: they are too few, or do not tell.
    """
    usable = sorted(each for each in known if each % UNIT == 0)
    if length % UNIT or len(usable) < _LENGTHS:
        raise NotRegular(f"{len(usable)} lengths, of which each is a multiple of {UNIT}")
    # The nearest ones.
    low, middle, high = sorted(sorted(usable, key=lambda each: abs(each - length))[:_LENGTHS])
    line = Bilinear({(1, each): known[each] for each in (low, high)})
    if line.step(1, middle).events != known[middle].renumbered().events:
        raise NotRegular(f"{middle} tokens are not on the line through {low} and {high}")
    step = line.step(1, length)
    noted = [known[each].operations for each in (low, middle, high)]
    if any(operations is None for operations in noted):
        return step
    return step._replace(operations=_operations((low, middle, high), noted, length))


def _operations(
    lengths: Sequence[int], noted: Sequence[StepOperations | None], length: int
) -> StepOperations:
    try:
        return interpolated([each for each in noted if each], _weights(lengths, length))
    except DifferentOperations as reason:
        raise NotRegular(str(reason)) from None


def _weights(lengths: Sequence[int], length: int) -> list[float]:
    """What the values at three lengths count in the value at another one, on the parabola through them."""
    found = []
    for one in lengths:
        weight = 1.0
        for other in lengths:
            if other != one:
                weight *= (length - other) / (one - other)
        found.append(weight)
    return found


def first_step_like(
    first: RecordedStep, later: RecordedStep, later_of_length: RecordedStep
) -> RecordedStep:
    """A run's first step with rows of another length, of which a later step is known: the ``first`` step of
    this length is a ``later`` one, and allocates what stays, such as the optimizer's state.

    Raises:
        NotRegular: it is not.
    """
    freed = {event.block for event in first.events if event.nbytes < 0}
    passing = [event for event in first.events if event.block in freed]
    labels = {block: label for block, label in first.labels.items() if block in freed}
    if RecordedStep(passing, labels).renumbered().events != later.renumbered().events:
        raise NotRegular("the first step is not like later ones")
    here = later_of_length.renumbered()
    offset = max(first.labels, default=0)
    labels = {block: label for block, label in first.labels.items() if block not in freed}
    labels |= {block + offset: label for block, label in here.labels.items()}
    moved = iter(here.events)
    events = []
    for event in first.events:
        if event.block in freed:
            event = next(moved)
            event = event._replace(block=event.block + offset)
        events.append(event)
    return RecordedStep(events, labels)
