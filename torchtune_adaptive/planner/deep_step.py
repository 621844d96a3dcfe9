"""The steps of a deep model, from those of two that have fewer of its layers."""

from __future__ import annotations

from collections.abc import Sequence

from torchtune_adaptive.planner.memory.peak import StartUp
from torchtune_adaptive.planner.memory.recorded_step import MemoryEvent, RecordedStep
from torchtune_adaptive.planner.repetition import Element, NotPeriodic, extended
from torchtune_adaptive.planner.speed.operations import RECORD, Operation, StepOperations

_BEGINS, _FREED = "begins", "freed"
_BEFORE = -1
"""Number of an event that was recorded before the step."""


def deep_step(few: RecordedStep, more: RecordedStep, times: int) -> RecordedStep:
    """The step of a model that has so many repetitions of its layers more than the first one has, of which
    the second one has one more.

    Raises:
        NotPeriodic: the two do not tell.
    """
    (step,) = _steps(extended(_of_memory(few), _of_memory(more), times))
    if few.operations is None or more.operations is None:
        return step
    found = extended(_of_operations(few.operations), _of_operations(more.operations), times)
    return step._replace(operations=_operations(found))


def deep_start_up(few: StartUp, more: StartUp, times: int) -> StartUp:
    """The same of what precedes the steps."""
    of_few, of_more = (_of_memory(one.set_up, one.first_step) for one in (few, more))
    set_up, first_step = _steps(extended(of_few, of_more, times))
    return StartUp(set_up, first_step)


def _of_memory(*steps: RecordedStep) -> list[Element]:
    """The memory events of steps that follow each other; each release refers to the allocation, and is of its
    kind and size."""
    found: list[Element] = []
    allocated: dict[int, int] = {}
    for step in steps:
        found.append(Element(_BEGINS))
        for block, nbytes, stream in step.events:
            if nbytes >= 0:
                allocated[block] = len(found)
                found.append(Element((stream, step.labels[block]), (nbytes,)))
            elif block in allocated:
                (_, label), sizes, *_ = found[allocated[block]]
                found.append(Element((_FREED, label), sizes, allocated[block]))
            else:
                raise NotPeriodic("a step frees memory of the step before")
    return found


def _steps(elements: Sequence[Element]) -> list[RecordedStep]:
    """The steps with these memory events. Their blocks are numbered from 1."""
    steps: list[RecordedStep] = []
    blocks: dict[int, int] = {}
    for place, (kind, sizes, refers_to, _) in enumerate(elements):
        if kind == _BEGINS:
            steps.append(RecordedStep([], {}))
            continue
        assert isinstance(kind, tuple)
        stream, label = kind
        if stream == _FREED:
            steps[-1].events.append(MemoryEvent(_found(blocks, refers_to), -1, 0))
        else:
            block = blocks[place] = len(blocks) + 1
            steps[-1].events.append(MemoryEvent(block, int(sizes[0]), stream))
            steps[-1].labels[block] = label
    return steps


def _of_operations(step: StepOperations) -> list[Element]:
    """The operations of a step; each wait refers to the record of its event."""
    found: list[Element] = []
    recorded: dict[int, int] = {}
    for part in step.parts():
        found.append(Element(_BEGINS))
        for one in part:
            if one.kind == RECORD:
                recorded[one.event] = len(found)
            refers_to = None if one.kind == RECORD else recorded.get(one.event)
            before = one.event and one.event not in recorded
            kind = one._replace(
                flops=0.0,
                nbytes=0.0,
                fused_bytes=0.0,
                shape=(0.0,) * len(one.shape),
                repeats=min(one.repeats, 1),
                event=_BEFORE if before else 0,
            )
            sizes = (one.flops, one.nbytes, one.fused_bytes, *one.shape)
            found.append(Element(kind, sizes, refers_to, max(one.repeats, 0)))
    return found


def _operations(elements: Sequence[Element]) -> StepOperations:
    """The step with these operations. Its events are numbered from 1."""
    parts: list[list[Operation]] = []
    events: dict[int, int] = {}
    # Repetitions share the objects for kind and sizes. Their identities are found faster than what they hold.
    known: dict[tuple[int, int], Operation] = {}
    for place, (kind, sizes, refers_to, repeats) in enumerate(elements):
        if kind == _BEGINS:
            parts.append([])
            continue
        assert isinstance(kind, Operation)
        event = kind.event
        if kind.kind == RECORD:
            event = events[place] = len(events) + 1
        elif refers_to is not None:
            event = _found(events, refers_to)
        operation = known.get((id(kind), id(sizes)))
        if operation is None:
            flops, nbytes, fused_bytes, *shape = sizes
            operation = known[id(kind), id(sizes)] = kind._replace(
                flops=flops, nbytes=nbytes, fused_bytes=fused_bytes, shape=tuple(shape)
            )
        if repeats or event != kind.event:
            operation = operation._replace(repeats=repeats or kind.repeats, event=event)
        parts[-1].append(operation)
    return StepOperations(parts[:-1], parts[-1])


def _found(numbers: dict[int, int], place: int | None) -> int:
    if place not in numbers:
        raise NotPeriodic("what a repetition refers to is not where it should be")
    return numbers[place]
