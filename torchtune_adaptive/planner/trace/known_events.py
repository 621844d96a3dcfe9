"""Events of functions that a step calls again and again, each traced once.

A model in fewer bits computes a weight from its parts in some twenty operations, each time that it is used.
What these allocate and free depends on the layouts of the parts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from torchtune_adaptive.planner.memory.recorded_step import Label, MemoryEvent
from torchtune_adaptive.planner.private import FakeTensor, FakeTensorMode
from torchtune_adaptive.planner.trace import fake_device
from torchtune_adaptive.planner.trace.known_results import KnownResults, MadeTensor
from torchtune_adaptive.planner.trace.operation_log import Entry
from torchtune_adaptive.planner.trace.recorder import Recorder, Watch


class _Known(NamedTuple):
    """What a call did, with the numbers of blocks as they were then."""

    given: list[int]
    """Blocks of the tensors that were given."""
    events: list[MemoryEvent]
    operations: list[str]
    """Operations that made the allocations among the events."""
    entries: list[Entry]
    """Entries in the log of operations."""
    result: MadeTensor
    block: int
    """Block of the result."""


class KnownEvents:
    """Calls functions, or repeats what a call of the same kind did."""

    def __init__(self, recorder: Recorder, watch: Watch, mode: FakeTensorMode) -> None:
        self._recorder, self._watch, self._mode = recorder, watch, mode
        self._known: dict[Hashable, _Known | None] = {}

    def call(
        self, function: Callable[[], torch.Tensor], kind: Hashable, given: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The result of a function that reads the tensors that are ``given``, and nothing else of the device.
        Their layouts and its ``kind`` decide what it does."""
        ours = all(type(t) is FakeTensor and t.fake_mode is self._mode for t in given)
        if not ours or not self._watch.recording:
            return function()
        recorder = self._recorder
        layouts = tuple((t.shape, t.stride(), t.storage_offset(), t.dtype, t.device) for t in given)
        blocks = [recorder.block_of(t.untyped_storage()) for t in given]
        shared = tuple(blocks.index(block) if block else None for block in blocks)
        key = (kind, layouts, shared, torch.is_grad_enabled(), recorder.log is None)
        if key not in self._known:
            result, self._known[key] = self._noted(function, blocks)
            return result
        known = self._known[key]
        if known is None:
            return function()
        return self._repeated(known, dict(zip([0, *known.given], [0, *blocks], strict=True)))

    def _noted(
        self, function: Callable[[], torch.Tensor], given: list[int]
    ) -> tuple[torch.Tensor, _Known | None]:
        """The result, and what was done for it; None if another call may do something else."""
        recorder = self._recorder
        noted = recorder.log.entries if recorder.log else []
        first, first_noted = len(recorder.events), len(noted)
        result = function()
        events, entries = recorder.events[first:], noted[first_noted:]
        allocations = [event for event in events if event.nbytes >= 0]
        made = {event.block for event in allocations}
        freed = {event.block for event in events if event.nbytes < 0}
        labels = [recorder.labels[event.block] for event in allocations]
        stream, phase = fake_device.current_stream().number, recorder.phase()
        block, layout = recorder.block_of(result.untyped_storage()), KnownResults.layout(result)
        seen = {0, *made, *given}
        regular = (
            layout is not None
            and not result.requires_grad
            and freed | {block} == made
            and block not in freed
            and all(event.stream == stream for event in allocations)
            and all(label == Label(recorder.category, phase, label.operation) for label in labels)
            and all(use is not None and seen >= use.reads.keys() | use.writes for _, use in entries)
        )
        if not regular or layout is None:
            return result, None
        operations = [label.operation for label in labels]
        return result, _Known(given, events, operations, entries, layout, block)

    def _repeated(self, known: _Known, blocks: dict[int, int]) -> torch.Tensor:
        """The result of another call. ``blocks`` has those that it is given, by those of the first call, and
        gets those that it makes."""
        recorder, operations = self._recorder, iter(known.operations)
        sizes: dict[int, int] = {}
        for block, nbytes, _ in known.events:
            if nbytes >= 0:
                sizes[block] = nbytes
                blocks[block] = recorder.allocate(nbytes, next(operations))
            else:
                recorder.free(blocks[block], sizes[block])
        result: torch.Tensor = self._watch.results.make(known.result)
        recorder.adopt(result.untyped_storage(), blocks[known.block])
        if recorder.log is not None:
            recorder.log.repeat(known.entries, blocks)
        return result
