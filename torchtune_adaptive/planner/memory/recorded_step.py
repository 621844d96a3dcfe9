"""The memory events of a step, and how those of any size follow from four traces.

The sequence of allocations in a step does not depend on how many rows a micro-batch has or how long they
are, and the size of each allocation is bilinear in the two: constant (parameters), per row, per token, or per
both (activations). So four traces, of two numbers of rows and two lengths, give every other step. That they
have the same structure is verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torchtune_adaptive.common import packed_rows, unpacked_rows
from torchtune_adaptive.planner.speed import operations
from torchtune_adaptive.planner.speed.operations import StepOperations


class MemoryEvent(NamedTuple):
    """An allocation or, if ``nbytes`` is -1, the release of a block."""

    block: int
    nbytes: int
    stream: int


class Label(NamedTuple):
    """Purpose of a block, and the operation that allocated it."""

    category: str
    phase: str
    operation: str


class RecordedStep(NamedTuple):
    """The events of one step in order, and the labels of the blocks that it allocates."""

    events: list[MemoryEvent]
    labels: dict[int, Label]
    operations: StepOperations | None = None
    """Operations with what they compute and move, where that was noted."""

    def renumbered(self) -> RecordedStep:
        """The same step with blocks numbered from 1, to compare it with others.

        Raises:
            NotRegular: it leaves blocks behind, or releases some of an earlier step.
        """
        number: dict[int, int] = {}
        events, left = [], 0
        for block, nbytes, stream in self.events:
            if nbytes >= 0:
                number[block] = len(number) + 1
            elif block not in number:
                raise NotRegular("a step frees memory of the step before")
            left += 1 if nbytes >= 0 else -1
            events.append(MemoryEvent(number[block], nbytes, stream))
        if left:
            raise NotRegular(f"a step leaves {left} blocks behind")
        return RecordedStep(events, {number[block]: label for block, label in self.labels.items()})

    def most_in_use(self) -> int:
        """The most bytes that were allocated in it at once."""
        return max(accumulate(self.changes(), initial=0))

    def changes(self) -> Iterator[int]:
        """The bytes that each event adds to those that are allocated, or takes from them."""
        sizes: dict[int, int] = {}
        for block, nbytes, _ in self.events:
            if nbytes >= 0:
                sizes[block] = nbytes
            yield nbytes if nbytes >= 0 else -sizes[block]

    def packed(self) -> dict[str, Any]:
        """The step for JSON. Few labels differ, so each is stored once."""
        kinds = {label: number for number, label in enumerate(dict.fromkeys(self.labels.values()))}
        return {
            "events": packed_rows(self.events),
            "kinds": [list(label) for label in kinds],
            "labels": packed_rows((block, kinds[label]) for block, label in self.labels.items()),
            "operations": operations.packed_up(self.operations) if self.operations else None,
        }

    @classmethod
    def unpacked(cls, packed: Mapping[str, Any]) -> RecordedStep:
        """The step that ``packed`` gave."""
        kinds = [Label(*kind) for kind in packed["kinds"]]
        events = [MemoryEvent(*event) for event in unpacked_rows(packed["events"], 3)]
        labels = {block: kinds[number] for block, number in unpacked_rows(packed["labels"], 2)}
        noted = packed["operations"]
        return cls(events, labels, operations.unpacked(noted) if noted else None)


class NotRegular(Exception):
    """Steps do not repeat, or differ in more than the sizes of their allocations."""


class Kept(NamedTuple):
    """A block that a first step keeps, such as the optimizer's state, and the number of events before it that
    later steps have as well."""

    place: int
    event: MemoryEvent


def kept_by(first: RecordedStep, later: RecordedStep) -> list[Kept]:
    """The blocks that a run's first step keeps.

    Raises:
        NotRegular: it differs from a later one in much more than these.
    """
    freed = {block for block, nbytes, _ in first.events if nbytes < 0}
    kept: list[Kept] = []
    others: list[MemoryEvent] = []
    for event in first.events:
        if event.nbytes >= 0 and event.block not in freed:
            kept.append(Kept(len(others), event))
        else:
            others.append(event)
    if _structure(RecordedStep(others, {}).renumbered()) == _structure(later.renumbered()):
        return kept
    places = _places(_kinds(RecordedStep(others, first.labels)), _kinds(later))
    return [Kept(places[place], event) for place, event in kept]


_ALIKE = 8
"""Events that show where two steps go on alike."""
_DIFFERENT = 64
"""Events that a first step may have more or fewer, if no more than a tenth: a trainer keeps its last loss."""


def _kinds(step: RecordedStep) -> list[tuple[bool, int, str]]:
    """What is done in each event, and the operation that allocated the block."""
    streams = {event.block: event.stream for event in step.events if event.nbytes >= 0}
    return [
        (
            nbytes < 0,
            streams.get(block, 0),
            _kind(step.labels[block].operation) if block in streams else "",
        )
        for block, nbytes, _ in step.events
    ]


def _kind(operation: str) -> str:
    """What FSDP gathers in a first step is made by ``empty``, and later has its memory by ``resize_``."""
    return "resize_" if operation.startswith("aten.empty.") else operation


def _places(some: Sequence[Any], others: Sequence[Any]) -> list[int]:
    """The place among the others of each of some events, and of their end.

    Raises:
        NotRegular: they differ too much.
    """
    places: list[int] = []
    left = min(_DIFFERENT, len(others) // 10)
    at = 0
    while len(places) < len(some) or at < len(others):
        here = len(places)
        if here < len(some) and at < len(others) and some[here] == others[at]:
            places.append(at)
            at += 1
            continue
        for missing in range(1, left + 1):
            for fewer in range(missing + 1):
                again, there = here + fewer, at + missing - fewer
                if some[again : again + _ALIKE] == others[there : there + _ALIKE]:
                    break
            else:
                continue
            places += [at] * fewer
            at, left = there, left - missing
            break
        else:
            raise NotRegular("a first step has other allocations than later ones")
    return [*places, len(others)]


def first_of_its_size(step: RecordedStep, kept: Sequence[Kept]) -> list[MemoryEvent]:
    """The events of a step as the first of a run has them, which keeps these blocks."""
    events: list[MemoryEvent] = []
    begin = 0
    for number, (place, event) in enumerate(kept, 1):
        events += step.events[begin:place]
        events.append(event._replace(block=-number))  # no block of the step has such a number
        begin = place
    return [*events, *step.events[begin:]]


class Bilinear:
    """Steps of any number of rows of any length, interpolated from traces. These are the ``corners``, by rows
    and length, of which there are two numbers of rows, and one length or two.

    Raises:
        NotRegular: they do not have the same structure.
    """

    def __init__(self, corners: Mapping[tuple[int, int], RecordedStep]) -> None:
        steps = {size: step.renumbered() for size, step in corners.items()}
        self.rows = sorted({rows for rows, _ in steps})
        self.lengths = sorted({length for _, length in steps})
        first = steps[self.rows[0], self.lengths[0]]
        for size, step in steps.items():
            if _structure(step) != _structure(first):
                raise NotRegular(f"steps of {size} have different allocations than smaller ones")
        self._first = first
        at = [[steps[rows, length].events for length in self.lengths] for rows in self.rows]
        self._sizes = [
            [[event.nbytes for event in events] for events in by_length] for by_length in at
        ]

    def step(self, rows: int, length: int) -> RecordedStep:
        """The step of that size."""
        low, high = self.rows[0], self.rows[-1]
        few_and_many = zip(self._sizes[0], self._sizes[-1], strict=True)
        by_length = [_line(few, many, low, high, rows) for few, many in few_and_many]
        low, high = self.lengths[0], self.lengths[-1]
        if low == high and length != low:
            raise ValueError(f"traces of rows of {low} tokens say nothing about {length}")
        sizes = _line(by_length[0], by_length[-1], low, high, length)
        events = [
            event if event[1] < 0 else MemoryEvent(event[0], max(0, round(nbytes)), event[2])
            for event, nbytes in zip(self._first.events, sizes, strict=True)
        ]
        return RecordedStep(events, self._first.labels)


def _structure(step: RecordedStep) -> list[tuple[int, bool, int]]:
    return [(block, nbytes < 0, stream) for block, nbytes, stream in step.events]


def _line(
    at_low: Sequence[float], at_high: Sequence[float], low: int, high: int, at: int
) -> Sequence[float]:
    if at == low or low == high:
        return at_low
    share = (at - low) / (high - low)
    return [a + share * (b - a) for a, b in zip(at_low, at_high, strict=True)]
