"""From the events of a few traced steps to the memory of steps of any size.

The sequence of allocations in a step does not depend on how many rows a micro-batch has or how long they
are, and the size of each allocation is bilinear in the two: constant (parameters), by row, by token, by
both (activations). So four traces, of two numbers of rows and two lengths, give every other step; that they
have one structure is checked, and a caller with a tracer at hand can check any size directly.

No torch in here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtune_adaptive.allocator import Allocator, Block


class Event(NamedTuple):
    """Memory given out, or (``nbytes`` is -1) taken back."""

    block: int
    nbytes: int
    stream: int


class Label(NamedTuple):
    """What a block is for, and what asked for it."""

    category: str
    phase: str
    operation: str


class Step(NamedTuple):
    """The events of one step in order, and the labels of the blocks that it gives out."""

    events: list[Event]
    labels: dict[int, Label]

    def renumbered(self) -> Step:
        """With blocks counted from 1, as every step counts them that leaves nothing behind.

        Raises:
            NotRegular: it leaves something behind, or takes back what another step gave out.
        """
        number: dict[int, int] = {}
        events, left = [], 0
        for block, nbytes, stream in self.events:
            if nbytes >= 0:
                number[block] = len(number) + 1
            elif block not in number:
                raise NotRegular("a step frees memory of the step before")
            left += 1 if nbytes >= 0 else -1
            events.append(Event(number[block], nbytes, stream))
        if left:
            raise NotRegular(f"a step leaves {left} blocks behind")
        return Step(events, {number[block]: label for block, label in self.labels.items()})


def packed_up(step: Step) -> dict[str, Any]:
    """A step as JSON can hold it, in little space: labels are few."""
    kinds = {label: number for number, label in enumerate(dict.fromkeys(step.labels.values()))}
    return {
        "events": [list(event) for event in step.events],
        "kinds": [list(label) for label in kinds],
        "labels": [[block, kinds[label]] for block, label in step.labels.items()],
    }


def unpacked(packed: Mapping[str, Any]) -> Step:
    """The step again."""
    kinds = [Label(*kind) for kind in packed["kinds"]]
    events = [Event(*event) for event in packed["events"]]
    return Step(events, {block: kinds[number] for block, number in packed["labels"]})


class NotRegular(Exception):
    """Steps do not repeat, or differ in more than the sizes of their allocations."""


class Bilinear:
    """A step of any number of rows of any length, out of traced ones.

    Args:
        corners: steps by rows and length; two numbers of rows, and one length or two.

    Raises:
        NotRegular: they do not have the same structure.
    """

    def __init__(self, corners: Mapping[tuple[int, int], Step]) -> None:
        steps = {size: step.renumbered() for size, step in corners.items()}
        self.rows = sorted({rows for rows, _ in steps})
        self.lengths = sorted({length for _, length in steps})
        first = steps[self.rows[0], self.lengths[0]]
        for size, step in steps.items():
            if len(step.events) != len(first.events) or any(
                (a.block, a.nbytes < 0, a.stream) != (b.block, b.nbytes < 0, b.stream)
                for a, b in zip(step.events, first.events, strict=True)
            ):
                raise NotRegular(f"steps of {size} have other allocations than smaller ones")
        self._first = first
        at = [[steps[rows, length].events for length in self.lengths] for rows in self.rows]
        self._sizes = [
            [[event.nbytes for event in events] for events in by_length] for by_length in at
        ]

    def step(self, rows: int, length: int) -> Step:
        """What a trace of that size would show."""
        low, high = self.rows[0], self.rows[-1]
        by_length = [
            _line(self._sizes[0][n], self._sizes[-1][n], low, high, rows)
            for n in range(len(self.lengths))
        ]
        low, high = self.lengths[0], self.lengths[-1]
        if low == high and length != low:
            raise ValueError(f"traces of rows of {low} tokens say nothing about {length}")
        sizes = _line(by_length[0], by_length[-1], low, high, length)
        events = [
            event if event.nbytes < 0 else event._replace(nbytes=max(0, round(nbytes)))
            for event, nbytes in zip(self._first.events, sizes, strict=True)
        ]
        return Step(events, self._first.labels)


def _line(
    at_low: Sequence[float], at_high: Sequence[float], low: int, high: int, at: int
) -> Sequence[float]:
    if at == low or low == high:
        return at_low
    share = (at - low) / (high - low)
    return [a + share * (b - a) for a, b in zip(at_low, at_high, strict=True)]


@dataclass(frozen=True)
class Device:
    """What a step runs on, as far as its memory goes."""

    name: str
    usable: int
    """Bytes that a run may use."""
    caching: bool = True
    """Whether tensors come from torch's caching allocator; a simulated device counts their bytes."""
    expandable: bool = False
    workspaces: tuple[int, ...] = ()
    """What libraries take from the allocator once and keep."""
    band: float = 0.0
    """The share by which a prediction may be wrong."""
    correction: float = 1.0
    """What peaks were found to be on it, by what was predicted."""


@dataclass(frozen=True)
class Peak:
    """The most memory that a step takes."""

    rows: int
    length: int
    live: int
    """Bytes of tensors."""
    allocated: int
    """The same as the allocator counts them."""
    reserved: int
    """What the allocator holds: this is what runs out."""
    parts: dict[str, int]
    """What tensors hold at the peak, by category."""
    phase: str
    operation: str

    def verdict(self, device: Device) -> str:
        """Whether it fits, where the error of the prediction leaves no doubt."""
        if self.reserved * (1 + device.band) <= device.usable:
            return "FITS"
        if self.reserved * (1 - device.band) > device.usable:
            return "DOES NOT FIT"
        return "UNCERTAIN"


@dataclass(frozen=True)
class Beginning:
    """What comes before the steps that are measured: parameters, and a first step, which makes the
    optimizer's state."""

    set_up: Step
    first_step: Step

    def held(self) -> dict[int, tuple[int, str]]:
        """What is still held when the next step begins: bytes and category by block."""
        labels = {**self.set_up.labels, **self.first_step.labels}
        held: dict[int, tuple[int, str]] = {}
        for block, nbytes, _ in (*self.set_up.events, *self.first_step.events):
            if nbytes >= 0:
                held[block] = (nbytes, labels[block].category)
            else:
                del held[block]
        return held


def peak(beginning: Beginning, step: Step, rows: int, length: int, device: Device) -> Peak:
    """The most that a step takes on a device, in a run that has been going for a while."""
    moment = _highest_moment(beginning, step, device)
    live = sum(moment.parts.values())
    allocated = reserved = live
    if device.caching:
        allocated, reserved = _replay(beginning, step, device)
    reserved = round(reserved * device.correction)
    return Peak(
        rows=rows,
        length=length,
        live=live,
        allocated=allocated,
        reserved=reserved,
        parts=dict(moment.parts),
        phase=moment.label.phase,
        operation=moment.label.operation,
    )


class _Moment(NamedTuple):
    parts: Counter[str]
    label: Label


def _highest_moment(beginning: Beginning, step: Step, device: Device) -> _Moment:
    parts = _parts_before(beginning, device)
    total = most = sum(parts.values())
    at, size = -1, dict[int, int]()
    for index, (block, nbytes, _) in enumerate(step.events):
        if nbytes >= 0:
            size[block] = nbytes
            total += nbytes
        else:
            total -= size[block]
        if total > most:
            most, at = total, index
    for block, nbytes, _ in step.events[: at + 1]:
        parts[step.labels[block].category] += nbytes if nbytes >= 0 else -size[block]
    nothing = Label("", "between steps", "")
    label = step.labels[step.events[at].block] if at >= 0 else nothing
    return _Moment(Counter({name: n for name, n in parts.items() if n}), label)


def _parts_before(beginning: Beginning, device: Device) -> Counter[str]:
    parts: Counter[str] = Counter()
    for nbytes, category in beginning.held().values():
        parts[category] += nbytes
    if device.workspaces:
        parts["workspaces"] += sum(device.workspaces)
    return parts


def timeline(
    beginning: Beginning, step: Step, device: Device, points: int = 400
) -> list[tuple[str, dict[str, int]]]:
    """Phase and bytes by category over one step, at its highest moment in each of so many stretches."""
    parts = _parts_before(beginning, device)
    size: dict[int, int] = {}
    stretch = max(1, len(step.events) // points)
    line: list[tuple[str, dict[str, int]]] = []
    highest = -1
    for index, (block, nbytes, _) in enumerate(step.events):
        label = step.labels[block]
        if nbytes >= 0:
            size[block] = nbytes
        parts[label.category] += nbytes if nbytes >= 0 else -size[block]
        total = sum(parts.values())
        if index // stretch >= len(line):
            line.append((label.phase, dict(parts)))
            highest = total
        elif total > highest:
            line[-1], highest = (label.phase, dict(parts)), total
    return line


def _replay(beginning: Beginning, step: Step, device: Device) -> tuple[int, int]:
    """Allocated and reserved, once the allocator has seen a step of this size before."""
    allocator = Allocator(expandable=device.expandable)
    for nbytes in device.workspaces:
        allocator.allocate(nbytes)
    blocks: dict[int, Block] = {}
    _play(allocator, beginning.set_up.events, blocks)
    _play(allocator, beginning.first_step.events, blocks)
    allocator.release()  # as a search does between trials
    allocator.watch()
    for _ in range(2):
        _play(allocator, step.events, {})
    return allocator.peak_allocated, allocator.peak_reserved


def _play(allocator: Allocator, events: Iterable[Event], blocks: dict[int, Block]) -> None:
    for block, nbytes, stream in events:
        if nbytes >= 0:
            blocks[block] = allocator.allocate(nbytes, stream)
        else:
            allocator.free(blocks.pop(block))


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest number of rows that fits, if more rows take more memory; 0 if not even one does.

    Args:
        fits: whether so many rows fit.
        guess: where to begin; the nearer to the answer, the fewer calls.
    """
    low, high = 0, 0
    rows, stride = max(1, guess), 1
    while not high or high - low > 1:
        if fits(rows):
            low = rows
        else:
            high = rows
        if low and high:
            rows = (low + high) // 2
        elif high == 1:
            return 0
        else:
            rows = max(1, rows + (-stride if high else stride))
            stride *= 2
    return low
