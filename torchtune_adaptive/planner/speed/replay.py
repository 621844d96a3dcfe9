"""The time of a step: its operations, replayed over the device's streams.

Each stream runs its operations in order, and waits for others where the traced step does. The host launches
operations in order as well, ahead of the device, unless they are too short for that or it has to wait.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torchtune_adaptive.planner.speed import devices
from torchtune_adaptive.planner.speed.devices import Speeds
from torchtune_adaptive.planner.speed.operations import (
    ATTENTION,
    COLLECTIVE,
    COPY,
    GATHERS,
    GEMM,
    HOST_WAIT,
    MEMORY,
    RECORD,
    REDUCES,
    SYNCHRONIZATION,
    WAIT,
    Operation,
    StepOperations,
)
from torchtune_adaptive.planner.speed.roofline import seconds

LAUNCHES = "launches"
"""Time in which the device waits for the host."""
_MAIN = 0


@dataclass
class StepTime:
    """Seconds of a step, and what the main stream does meanwhile."""

    seconds: float
    parts: dict[str, float]
    """Seconds by kind of operation, of waiting for collectives and copies, and for launches. They add up."""
    recomputing: float
    """Seconds in which the backward pass repeats the forward pass."""
    model_flops: float
    """FLOPs without those of repetitions."""


def _zeros() -> defaultdict[Any, float]:
    return defaultdict(float)


@dataclass
class _Clock:
    """Times at which the host and each stream are done with what they have been given."""

    host: float = 0.0
    streams: defaultdict[int, float] = field(default_factory=_zeros)
    events: dict[int, tuple[float, str]] = field(default_factory=dict)
    """Time of each event, and the kind of the operation before it."""
    last: dict[int, str] = field(default_factory=dict)
    """Kind of the last operation of each stream."""
    waits: defaultdict[str, float] = field(default_factory=_zeros)
    busy: defaultdict[str, float] = field(default_factory=_zeros)
    recomputing: float = 0.0
    repeating: int = 0
    """Layer that is being repeated, as in ``Operation.repeats``."""
    collectives: deque[tuple[float, float, float]] = field(default_factory=deque)
    """When the latest collectives begin and end, one after the other: they share the links; and the bytes/s
    that each sends."""

    def now(self) -> float:
        return max([self.host, *self.streams.values()])


def step_time(
    step: StepOperations, speeds: Speeds, ranks: int, micro_batches: int, compiled: bool = False
) -> StepTime:
    """The time of one of many steps with so many micro-batches; ``step`` has one of them, or up to three."""
    parts = step.of_micro_batches(micro_batches)
    few = step.of_micro_batches(min(3, micro_batches))
    clock = _Clock()
    cost = _Costs(speeds, ranks, compiled, chooses_operations(parts[-1]))
    _play([*few, step.update], clock, cost)  # so that the step that counts begins as most do
    time = _played([*few, step.update], clock, cost)
    if further := micro_batches - len(few):
        # What a further micro-batch takes is the difference of three to two.
        two = step.of_micro_batches(2)
        time = _extended(time, _played([*two, step.update], clock, cost), further)
    flops = sum(one.flops for part in (*parts, step.update) for one in part if not one.repeats)
    return replace(time, model_flops=flops)


def _extended(time: StepTime, one_less: StepTime, further: int) -> StepTime:
    """The time with so many further micro-batches, each of which adds what the last one did."""

    def extended(now: float, before: float) -> float:
        return now + further * (now - before)

    return StepTime(
        extended(time.seconds, one_less.seconds),
        {name: extended(part, one_less.parts.get(name, 0.0)) for name, part in time.parts.items()},
        extended(time.recomputing, one_less.recomputing),
        0.0,
    )


class _Costs(dict[Operation, float]):
    """Seconds by operation: layers repeat themselves, so most have been computed before."""

    def __init__(self, speeds: Speeds, ranks: int, compiled: bool, choosing: bool) -> None:
        super().__init__()
        self.speeds, self.ranks, self.compiled = speeds, ranks, compiled
        self.choosing = choosing

    def sent(self, collective: Operation) -> float:
        """The bytes/s that a collective sends."""
        size, distance = map(int, collective.shape or (self.ranks, 1))
        return self.speeds.collective_bandwidth(size, distance)

    def left_over(self, operation: Operation, sent: float) -> float:
        """The share of the device that a collective leaves to an operation: of the memory's bandwidth, or of
        the multiprocessors."""
        speeds = self.speeds
        if speeds.is_host or operation.kind == COPY:
            return 1.0
        if operation.kind == MEMORY:  # what is sent is read, and written
            return max(0.5, 1.0 - 2 * sent / (speeds.bandwidth * devices.STREAMING))
        channels = devices.CHANNELS if speeds.has_nvlink else devices.PCIE_CHANNELS
        return 1.0 - channels / speeds.processors

    def __missing__(self, operation: Operation) -> float:
        self[operation] = seconds(operation, self.speeds, self.ranks, self.compiled)
        return self[operation]


def _played(parts: Sequence[Sequence[Operation]], clock: _Clock, cost: _Costs) -> StepTime:
    clock.waits, clock.busy, clock.recomputing = _zeros(), _zeros(), 0.0
    begun = clock.now()
    _play(parts, clock, cost)
    took = clock.now() - begun
    spent: dict[str, float] = dict(clock.busy)
    for kind, waited in clock.waits.items():
        spent[kind] = spent.get(kind, 0.0) + waited
    rest = took - sum(spent.values())  # the main stream is done before another one, or the host
    spent[LAUNCHES] = spent.get(LAUNCHES, 0.0) + rest
    return StepTime(took, spent, clock.recomputing, 0.0)


def _play(parts: Sequence[Sequence[Operation]], clock: _Clock, cost: _Costs) -> None:
    streams, events = clock.streams, clock.events
    for part in parts:
        for one in part:
            stream = one.stream
            if one.kind == RECORD:
                recorded = max(streams[stream], clock.host)
                events[one.event] = (recorded, clock.last.get(stream, MEMORY))
                clock.host += devices.SYNCHRONIZE
            elif one.kind == WAIT:
                _wait(clock, stream, *events.get(one.event, (0.0, MEMORY)))
                clock.host += devices.SYNCHRONIZE
            elif one.kind == HOST_WAIT:
                until = events.get(one.event, (0.0, ""))[0] if one.event else streams[stream]
                clock.host = max(clock.host, until)
            else:
                _run(clock, one, cost)


def _wait(clock: _Clock, stream: int, until: float, kind: str) -> None:
    waited = until - max(clock.streams[stream], clock.host)
    if waited > 0:
        if stream == _MAIN:
            reason = kind if kind in (COLLECTIVE, COPY) else COLLECTIVE
            clock.waits[LAUNCHES] += max(0.0, clock.host - clock.streams[stream])
            clock.waits[reason] += waited
        clock.streams[stream] = until


def _run(clock: _Clock, one: Operation, cost: _Costs) -> None:
    took = cost[one]
    if not cost.compiled:
        launches = one.times * cost.speeds.launch
        clock.host += launches + _host_besides(one, clock.repeating, cost.choosing)
    elif not one.joins:
        clock.host += cost.speeds.compiled_launch
    if one.name in (GATHERS, REDUCES):
        launches = devices.FSDP_COLLECTIVE + devices.FSDP_PARAMETER * one.shape[0]
        clock.host += launches * cost.speeds.launch
    clock.repeating = one.repeats
    start = max(clock.streams[one.stream], clock.host)
    if one.kind == COLLECTIVE:
        start = max(start, clock.collectives[-1][1] if clock.collectives else 0.0)
        clock.collectives.append((start, start + took, cost.sent(one)))
    elif one.stream == _MAIN:
        took = _beside_collectives(clock.collectives, start, took, partial(cost.left_over, one))
    if one.stream == _MAIN:
        idle = COLLECTIVE if one.kind == COLLECTIVE and start > clock.host else LAUNCHES
        clock.waits[idle] += start - clock.streams[_MAIN]
        clock.busy[one.kind] += took
        clock.recomputing += took if one.repeats else 0.0
    clock.streams[one.stream] = start + took
    if cost.speeds.is_host:
        clock.host = start + took
    clock.last[one.stream] = one.kind


def _beside_collectives(
    collectives: deque[tuple[float, float, float]],
    start: float,
    took: float,
    left_over: Callable[[float], float],
) -> float:
    """The time of an operation that has only a share of the device while a collective runs."""
    while collectives and collectives[0][1] <= start:
        collectives.popleft()
    at, work = start, took
    for begins, ends, sent in collectives:
        alone = max(0.0, begins - at)
        if work <= alone:
            break
        at, work = at + alone, work - alone
        share = left_over(sent)
        beside = (ends - at) * share
        if work <= beside:
            return at + work / share - start
        at, work = ends, work - beside
    return at + work - start


def _host_besides(one: Operation, before: int, choosing: bool) -> float:
    """The host's seconds for an operation that is repeated, besides those of its launch; ``before`` is the
    layer that the operation before it repeats, ``choosing`` as ``chooses_operations`` finds it."""
    first = devices.REPEATING if one.repeats and one.repeats != before else 0.0
    both_passes = 2 * devices.CHOOSING if choosing and one.repeats > 0 else 0.0
    return first + both_passes


def host_seconds_to_repeat(
    operations: Iterable[Operation], speeds: Speeds, choosing: bool
) -> float:
    """The host's time to repeat operations, launches included."""
    time, before = 0.0, 0
    for one in operations:
        if one.kind in SYNCHRONIZATION:
            continue
        time += speeds.launch * bool(one.repeats) + _host_besides(one, before, choosing)
        before = one.repeats
    return time


def chooses_operations(part: Iterable[Operation]) -> bool:
    """Whether layers are checkpointed by operation: matrix products are what is not repeated then."""
    kinds = {one.kind for one in part if one.repeats > 0}
    return bool(kinds) and GEMM not in kinds


NAMES = {
    GEMM: "matrix products",
    ATTENTION: "attention",
    MEMORY: "memory-bound kernels",
    COLLECTIVE: "communication that is not hidden",
    COPY: "copies to and from the host",
    LAUNCHES: "waiting for launches",
}
"""Names of the parts of a step's time, for people."""
