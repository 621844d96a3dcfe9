"""From the memory events of steps to their peaks, as the caching allocator would reach them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torchtune_adaptive.memory_model.allocator import Allocator, Block
from torchtune_adaptive.memory_model.steps import Label, MemoryEvent, RecordedStep


@dataclass(frozen=True)
class DeviceLimits:
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

    def verdict(self, device: DeviceLimits) -> str:
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

    set_up: RecordedStep
    first_step: RecordedStep

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


def peak(
    beginning: Beginning, step: RecordedStep, rows: int, length: int, device: DeviceLimits
) -> Peak:
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


def _highest_moment(beginning: Beginning, step: RecordedStep, device: DeviceLimits) -> _Moment:
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


def _parts_before(beginning: Beginning, device: DeviceLimits) -> Counter[str]:
    parts: Counter[str] = Counter()
    for nbytes, category in beginning.held().values():
        parts[category] += nbytes
    if device.workspaces:
        parts["workspaces"] += sum(device.workspaces)
    return parts


def timeline(
    beginning: Beginning, step: RecordedStep, device: DeviceLimits, points: int = 400
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


def _replay(beginning: Beginning, step: RecordedStep, device: DeviceLimits) -> tuple[int, int]:
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


def _play(allocator: Allocator, events: Iterable[MemoryEvent], blocks: dict[int, Block]) -> None:
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
