"""Events that are repeated: those of the call itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtune_adaptive.planner.memory.recorded_step import RecordedStep
from torchtune_adaptive.planner.trace.known_events import KnownEvents
from torchtune_adaptive.planner.trace.operation_log import OperationLog
from torchtune_adaptive.planner.trace.recorder import Recorder, Watch

SHAPES = ((4, 8), (4, 8), (2, 8), (4, 8), (2, 8))
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def weight(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A weight from its parts, which takes temporaries."""
    high, low = (packed >> 4) * scales, (packed & 15) * scales
    return torch.stack([high, low], dim=-1).reshape(packed.shape[0], -1)


def whole_or_view(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return packed.view(-1)


class Keeps:
    """A function that keeps something, and frees what it has kept."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []

    def __call__(self, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        self.held = [packed + 1]
        return packed * scales


def traced(function: Function, known: bool) -> tuple[RecordedStep, list[Any], int]:
    """The step that calls the function for each shape, the layouts of its results, and how often it ran."""
    recorder = Recorder(torch.device("cpu"))
    recorder.listening, layer, calls = True, 0, 0
    recorder.phase = lambda: "backward" if layer else "forward"
    recorder.log = OperationLog("cpu", recorder.block_of, recorder.phase, lambda: layer)

    def counted(*parts: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return function(*parts)

    layouts = []
    with FakeTensorMode() as mode, Watch(recorder, mode) as watch:
        events = KnownEvents(recorder, watch, mode)
        for layer, (rows, columns) in enumerate(SHAPES):
            recorder.category = f"category {layer}"
            parts = [torch.empty(rows, columns, dtype=torch.uint8), torch.empty(rows, 1)]
            call = partial(counted, *parts)
            made = events.call(call, "weight", parts) if known else call()
            layouts.append((made.shape, made.stride(), made.dtype, made.device))
            made @ made.t()
            del made
    recorder.log.next_part()
    return recorder.take_events()._replace(operations=recorder.log.finish()), layouts, calls


def test_repeated_events_are_those_of_the_call() -> None:
    (step, layouts, calls), (expected, their_layouts, each) = (
        traced(weight, known) for known in (True, False)
    )
    assert (calls, each) == (len(set(SHAPES)), len(SHAPES))
    assert step == expected and layouts == their_layouts
    assert len(step.events) > 50 and step.operations is not None


@pytest.mark.parametrize("make", [lambda: whole_or_view, Keeps], ids=["a view", "kept"])
def test_what_may_differ_the_next_time_is_called_each_time(make: Callable[[], Function]) -> None:
    (step, _, calls), (expected, _, each) = (traced(make(), known) for known in (True, False))
    assert calls == each == len(SHAPES)
    assert step == expected
