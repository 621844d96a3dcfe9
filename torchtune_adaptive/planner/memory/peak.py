"""The peak of a step on a device, computed from the step's memory events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torchtune_adaptive.planner.memory.allocator import (
    BESIDE,
    Allocator,
    LimitedAllocator,
    MemoryBlock,
    OutOfMemory,
)
from torchtune_adaptive.planner.memory.recorded_step import (
    Kept,
    Label,
    MemoryEvent,
    NotRegular,
    RecordedStep,
    first_of_its_size,
    kept_by,
)

DOES_NOT_FIT = "DOES NOT FIT"
"""The verdict on a peak that is above the usable memory by more than the prediction's error."""

FRAGMENTATION = 0.07
"""The share by which more may be reserved than predicted where memory is fragmented: on several ranks, by
streams and blocks of many sizes (two of three published peaks were predicted 6.5 % too low, see
``docs/results/planner.md``), and with weights of 4 bits, by what loading leaves behind, which is not traced
(6.5 % too low at most but in one run, 15.8 %, see ``docs/results/published.md``)."""


@dataclass(frozen=True)
class DeviceLimits:
    """The memory of a device, as a prediction needs to know it."""

    name: str
    usable_bytes: int
    """Usable memory: what a peak may reach."""
    caching: bool = True
    """Whether tensors come from torch's caching allocator; a simulated device counts their bytes."""
    expandable: bool = False
    """Whether the allocator has expandable segments."""
    workspaces: tuple[int, ...] = ()
    """Bytes that libraries allocate once and keep."""
    band: float = 0.0
    """The error that a prediction may have, as a share of the peak."""
    fragmentation: float = 0.0
    """The share by which more may be reserved than predicted, where that is more than ``band``."""
    correction: float = 1.0
    """Measured / predicted peak, where an earlier search measured it."""
    before_ampere: bool = False
    """Whether it is older than Ampere, so that torch computes attention by other kernels."""

    @property
    def as_replayed(self) -> tuple[object, ...]:
        """What a replay depends on: the same for GPUs that differ only in how much memory they have."""
        return self.caching, self.expandable, self.workspaces, self.correction

    @property
    def fragmented(self) -> DeviceLimits:
        """The same where memory is fragmented."""
        return replace(self, fragmentation=FRAGMENTATION) if self.caching else self

    @property
    def band_above(self) -> float:
        """The share by which more may be reserved than predicted."""
        return max(self.band, self.fragmentation)

    @property
    def surely_usable_bytes(self) -> int:
        """What a predicted peak may reach and fit even if the prediction is too low by its error."""
        return int(self.usable_bytes / (1 + self.band_above))

    @property
    def perhaps_usable_bytes(self) -> int:
        """What a predicted peak may reach and fit if the prediction is too high by its error."""
        return int(self.usable_bytes / (1 - self.band))

    def verdict(self, reserved: int) -> str:
        """Whether a predicted peak is within the usable memory; uncertain if the difference is within the
        error."""
        if reserved <= self.surely_usable_bytes:
            return "FITS"
        return DOES_NOT_FIT if reserved > self.perhaps_usable_bytes else "UNCERTAIN"

    @classmethod
    def simulated(cls, memory: int, headroom: float) -> DeviceLimits:
        """A CPU on which the tensors of a step may take so much memory."""
        usable_bytes = int(memory * (1 - headroom))
        return cls("simulated device", usable_bytes, caching=False, band=0.001)


@dataclass(frozen=True)
class Peak:
    """The most memory that a step takes."""

    rows: int
    length: int
    live: int
    """Bytes of tensors."""
    allocated: int
    """Bytes of tensors as the allocator counts them, rounded up to blocks."""
    reserved: int
    """Bytes that the allocator holds: this is what runs out."""
    parts: dict[str, int]
    """Bytes of tensors at the peak, by category."""
    phase: str
    """Part of the step in which the peak is reached."""
    operation: str
    """The operation that reaches it."""
    with_retries: bool = False
    """Whether more is reserved than there is, but the step runs if the allocator returns what it does not use
    in the middle of it."""
    by_phase: Mapping[str, int] = field(default_factory=dict)
    """The most bytes of tensors in each part of the step."""

    def verdict(self, device: DeviceLimits) -> str:
        """The device's verdict on the peak."""
        return "UNCERTAIN" if self.with_retries else device.verdict(self.reserved)


@dataclass(frozen=True)
class StartUp:
    """Events before the steps that are measured: parameters are allocated, and a first step creates the
    optimizer's state.

    Note [First steps]. A run that searches takes its first step with few rows, and the allocator returns what
    it does not use between trials. In one that does not, the first step has as many rows as the others. Its
    activations are gone when it creates the optimizer's state, which then lies in their segments, and a later
    step does not find these as they were: a full fine-tuning on an A100 had reserved 46 GiB, where after a
    search it would have been 37 (``docs/results/published.md``).
    """

    set_up: RecordedStep
    first_step: RecordedStep
    kept: Sequence[Kept] | None = None
    """What the first step keeps, in a run that does not search; None in others."""

    def without_search(self, step: RecordedStep) -> StartUp:
        """The same in a run that begins with this step; unchanged if its first step has other allocations
        than later ones."""
        with suppress(NotRegular):
            return replace(self, kept=kept_by(self.first_step, step))
        return self


def peak(
    start_up: StartUp, step: RecordedStep, rows: int, length: int, device: DeviceLimits
) -> Peak:
    """The memory of a step on a device, in a run whose earlier steps had the same size."""
    found = replayed(start_up, step, rows, length, device)
    return replace(found, with_retries=runs_with_retries(found, start_up, step, device))


def replayed(
    start_up: StartUp, step: RecordedStep, rows: int, length: int, device: DeviceLimits
) -> Peak:
    """The same as far as it does not depend on how much memory there is."""
    parts, (_, phase, operation), by_phase = _highest_moment(start_up, step, device)
    live = allocated = reserved = sum(parts.values())
    if device.caching:
        allocator = Allocator(device.expandable)
        _replay(allocator, start_up, step, device)
        allocated, reserved = allocator.peak_allocated, allocator.peak_reserved
    reserved = round(reserved * device.correction)
    return Peak(rows, length, live, allocated, reserved, parts, phase, operation, False, by_phase)


def _highest_moment(
    start_up: StartUp, step: RecordedStep, device: DeviceLimits
) -> tuple[dict[str, int], Label, dict[str, int]]:
    """Bytes by category when most are allocated, what has been allocated last then, and the most bytes by the
    part of the step."""
    parts = _parts_before(start_up, device)
    total = most = sum(parts.values())
    at, changes = -1, [*step.changes()]
    by_phase: Counter[str] = Counter()
    for index, change in enumerate(changes):
        total += change
        if change > 0:
            phase = step.labels[step.events[index].block].phase
            by_phase[phase] = max(by_phase[phase], total)
        if total > most:
            most, at = total, index
    for event, change in zip(step.events, changes[: at + 1], strict=False):
        parts[step.labels[event.block].category] += change
    nothing = Label("", "between steps", "")
    label = step.labels[step.events[at].block] if at >= 0 else nothing
    return {name: n for name, n in parts.items() if n}, label, dict(by_phase)


def _parts_before(start_up: StartUp, device: DeviceLimits) -> Counter[str]:
    """Bytes by category of what is still allocated when the step begins."""
    labels = {**start_up.set_up.labels, **start_up.first_step.labels}
    held: dict[int, int] = {}
    for block, nbytes, _ in (*start_up.set_up.events, *start_up.first_step.events):
        if nbytes >= 0:
            held[block] = nbytes
        else:
            del held[block]
    parts: Counter[str] = Counter()
    for block, nbytes in held.items():
        parts[labels[block].category] += nbytes
    if device.workspaces:
        parts["workspaces"] += sum(device.workspaces)
    return parts


def _replay(
    allocator: Allocator, start_up: StartUp, step: RecordedStep, device: DeviceLimits
) -> None:
    """Let the allocator see a step of this size twice, after all that precedes it; its peaks are those of
    these steps, and of the first one if that has the same size."""
    for nbytes in device.workspaces:
        allocator.allocate(nbytes)
    blocks: dict[int, MemoryBlock | int] = {}
    _play(allocator, start_up.set_up.events, blocks)
    if start_up.kept is None:
        _play(allocator, start_up.first_step.events, blocks)
        allocator.release()  # as between trials of a search
        allocator.watch()
    else:
        allocator.watch()
        _play(allocator, first_of_its_size(step, start_up.kept), {})
    for _ in range(2):
        _play(allocator, step.events, {})


def runs_with_retries(
    found: Peak, start_up: StartUp, step: RecordedStep, device: DeviceLimits
) -> bool:
    """Whether a step with this peak reserves more than there is, and may run nevertheless."""
    capacity = int(device.perhaps_usable_bytes / device.correction)
    if (
        not device.caching
        or device.verdict(found.reserved) != DOES_NOT_FIT
        or found.live > capacity
    ):
        return False
    try:
        _replay(LimitedAllocator(capacity, device.expandable), start_up, step, device)
    except OutOfMemory:
        return False
    return True


def _play(
    allocator: Allocator, events: Iterable[MemoryEvent], blocks: dict[int, MemoryBlock | int]
) -> None:
    for block, nbytes, stream in events:
        if stream == BESIDE:
            allocator.release()  # as programs do before
            allocator.request(nbytes)
            blocks[block] = nbytes
        elif nbytes >= 0:
            blocks[block] = allocator.allocate(nbytes, stream)
        elif isinstance(held := blocks.pop(block), int):
            allocator.reserved -= held
        else:
            allocator.free(held)
