"""The steps of a program's optimizer, cut out of what is recorded.

A step begins with the first batch or forward pass after the one before it. What it leaves to the next one,
such as gradients that are only deleted then, is taken to be allocated as it begins, and deleted as it ends.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchtune_adaptive.planner.memory.peak import StartUp
from torchtune_adaptive.planner.memory.recorded_step import MemoryEvent, NotRegular, RecordedStep
from torchtune_adaptive.planner.private import in_backward
from torchtune_adaptive.planner.programs import notes
from torchtune_adaptive.planner.programs.device import is_on_device, is_planned
from torchtune_adaptive.planner.programs.imports import put
from torchtune_adaptive.planner.programs.request import GENERATION
from torchtune_adaptive.planner.told import tell
from torchtune_adaptive.planner.trace import fake_device
from torchtune_adaptive.planner.trace.operation_log import OperationLog
from torchtune_adaptive.planner.trace.recorder import Recorder
from torchtune_adaptive.planner.trace.step_tracer import StepTracer, state_of, update_at_once

WANTED = 3
"""The number of steps that a program takes, if these repeat."""
_MOST, _MOST_GENERATING, _TIMES = 8, 80, 3
"""The most steps among which one is looked for that repeats, and what precedes them; where several are about
what one of them generates, until one has so many times."""
_FORWARD, _BACKWARD, _UPDATE = "forward", "backward", "optimizer step"


class ProgramSteps:
    """Follows a program's steps, and calls functions as they begin, and after so many of them."""

    def __init__(
        self, tracer: StepTracer, begins: Callable[[], None], finished: Callable[[], None]
    ) -> None:
        self._tracer, self._recorder = tracer, tracer.recorder
        self._begins, self._finished = begins, finished
        self._parts: list[RecordedStep] = []
        self._ahead: list[set[int]] = []
        """Blocks of each part that are made after its step, as the next batch may be."""
        self._done = 0
        """The events of this part up to the end of its step."""
        self._stage = "set-up"
        self._between = True
        self._log: OperationLog | None = None
        self._heard: AbstractContextManager[None] | None = None
        self._hook: Any = None
        self.wanted = WANTED
        self.taken = 0
        """The number of steps of the optimizer so far."""
        self._passes = self._passes_before = 0
        self._generating = set[int]()
        """The steps that generate something."""
        self.shared = 1
        """The passes that are made with what was generated before them."""
        self._recorder.phase = self._phase

    def follow(self) -> None:
        """Follow them from now on."""
        register_optimizer_step_pre_hook(self._updates)
        register_optimizer_step_post_hook(self._updated)
        backward = torch.autograd.backward

        def whole(*arguments: Any, **options: Any) -> None:
            backward(*arguments, **options)
            self._passed()

        put(torch.autograd, "backward", whole)
        self._await_forward()

    def batch(self) -> None:
        """The program asks for a batch."""
        if torch.is_grad_enabled() and self._tracer.recorder.in_use:
            self._work(Recorder.INPUTS)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A context in which a model generates."""
        before = self._stage, self._recorder.category
        self.shared = max(self.shared, self._passes - self._passes_before)
        self._passes_before = self._passes
        self._generating |= {len(self._parts)} - {0}
        self._stage, self._recorder.category = GENERATION, Recorder.ACTIVATIONS
        waits = self._hook is not None
        if waits:
            self._hook.remove()
            self._hook = None
        try:
            yield
        finally:
            self._stage, self._recorder.category = before
            if waits:
                self._await_forward()

    @property
    def recorded(self) -> tuple[StartUp, RecordedStep]:
        """What precedes the last step, and that.

        Raises:
            NotRegular: the program does something else in each step.
        """
        for width in range(1, len(self._parts) - 1):
            for end in (None, -1):  # perhaps an epoch has ended in the last one
                with suppress(NotRegular):
                    return self._closed(self._parts[:end], width)
        return self._closed(self._parts, 1)

    @property
    def enough(self) -> int:
        """How many steps tell the same as these."""
        try:
            one, other = (
                _closed(self._parts[:end], self._ahead, 1)[1].renumbered() for end in (-1, None)
            )
        except NotRegular:
            return WANTED
        return WANTED - (one.events == other.events and not self._generating)

    def _closed(self, parts: Sequence[RecordedStep], width: int) -> tuple[StartUp, RecordedStep]:
        if self._generating and len(parts) - 1 not in self._generating:
            raise NotRegular("a step generates what more than a few steps are about")
        return _closed(parts, self._ahead, width)

    @property
    def begun(self) -> bool:
        """Whether the first step has begun."""
        return bool(self._parts)

    @property
    def may_go_on(self) -> bool:
        """Whether a further step may be like another one: an epoch may have ended in these."""
        generate = 0 < len(self._generating) <= _TIMES
        return len(self._parts) < (_MOST_GENERATING if generate else _MOST)

    @property
    def complete(self) -> bool:
        """Whether there is a step after the first one."""
        return len(self._parts) > 2

    def _phase(self) -> str:
        return _BACKWARD if in_backward() else self._stage

    def _await_forward(self) -> None:
        """Learn of the next forward pass; without a hook while it runs, as it holds what it is given."""
        if self._hook is None:
            self._hook = register_module_forward_pre_hook(self._forward)

    def _forward(self, module: torch.nn.Module, _: Any) -> None:
        if not (torch.is_grad_enabled() and self._recorder.in_use) or in_backward():
            return
        if not any(map(is_planned, module.parameters())):
            return
        self._hook.remove()
        self._hook = None
        self._work(Recorder.ACTIVATIONS)

    def _work(self, category: str) -> None:
        if not self._parts:
            self._begins()
        if self._between:
            self._cut()
        self._between = False
        self._stage, self._recorder.category = _FORWARD, category
        tell(f"step {len(self._parts)} of {self.wanted}")

    def _passed(self) -> None:
        """A backward pass is over."""
        if self._between or self._stage == _UPDATE or in_backward():  # one in another
            return
        self._passes += 1
        if self._log is not None:
            self._log.next_part()
        self._stage, self._recorder.category = _UPDATE, Recorder.STEPPING
        self._await_forward()

    def _updates(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stage, self._recorder.category = _UPDATE, Recorder.STEPPING
        update_at_once(optimizer, self._tracer.device)
        parameters = (one for group in optimizer.param_groups for one in group["params"])
        gradients = (one.grad for one in parameters if one.grad is not None)
        self._recorder.relabel(gradients, Recorder.GRADIENTS)

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        trained = [one for group in optimizer.param_groups for one in group["params"]]
        if self._between or not any(map(is_planned, trained)):
            return
        if not any(map(is_on_device, trained)):
            notes.note("optimizer: on the host, of which neither memory nor time is planned")
        self.taken += 1
        self._done = len(self._recorder.events)
        self._recorder.category = Recorder.INPUTS
        self._between = True
        if self.taken == 1:
            self._recorder.relabel(state_of([optimizer]), Recorder.OPTIMIZER)
        self._await_forward()

    def _cut(self) -> None:
        """End a step, and begin the next one."""
        gc.collect()
        part = self._recorder.take_events()
        self._tracer.label_streams(part)
        if self._log is not None:
            part = part._replace(operations=self._log.finish())
        self._parts.append(part)
        self._ahead.append(_made(part.events[self._done :]))
        gc.disable()  # or when reference cycles are freed would depend on chance
        gc.freeze()
        if len(self._parts) > self.wanted:
            self._finished()
        recorder = self._recorder
        recorder.peak = recorder.in_use
        if len(self._parts) == 1:  # of the first step, memory is all that is asked for
            return
        self._log = recorder.log = OperationLog(
            recorder.device.type, recorder.block_of, recorder.phase, lambda: 0
        )
        self._heard = fake_device.heard_by(self._log)
        self._heard.__enter__()


def _closed(
    parts: Sequence[RecordedStep], ahead: Sequence[set[int]], width: int
) -> tuple[StartUp, RecordedStep]:
    """What precedes the last parts, so many as repeat, and the one of them in which most is allocated, as a
    step which leaves nothing behind."""
    begin = len(parts) - width
    if begin < 2:
        raise NotRegular("no step follows the first one")
    made = {event.block: event for part in parts for event in part.events if event.nbytes >= 0}
    labels = {block: label for part in parts for block, label in part.labels.items()}
    new = [_made(part.events) for part in parts]
    gone = [{event.block for event in part.events if event.nbytes < 0} for part in parts]
    taken = _all(gone[begin:]).difference(*new[begin:])
    left = _all(new[begin:]).difference(*gone[begin:])
    if _sizes(taken, made) != _sizes(left, made):
        raise NotRegular(f"a step leaves {len(left)} blocks behind, and deletes {len(taken)}")
    held = ahead[begin - 1].difference(*gone)  # until a later step
    steps = []
    for at in range(begin, len(parts)):
        there = sorted(taken.union(held, *new[begin:at]).difference(*gone[begin:at]))
        ends = sorted(new[at].union(there) - gone[at])
        events = [*(made[block] for block in there), *parts[at].events, *map(_freed, ends)]
        named = {**parts[at].labels, **{block: labels[block] for block in there}}
        steps.append(RecordedStep(events, named, parts[at].operations))
    # What a later step deletes is there no more when one begins.
    ends = sorted((_all(gone[2:]) | held) & _all(new[:2]))
    set_up, first = parts[:2]
    start_up = StartUp(set_up, RecordedStep([*first.events, *map(_freed, ends)], first.labels))
    return start_up, max(steps, key=RecordedStep.most_in_use)


def _made(events: Sequence[MemoryEvent]) -> set[int]:
    return {event.block for event in events if event.nbytes >= 0}


def _all(blocks: Sequence[set[int]]) -> set[int]:
    return set[int]().union(*blocks)


def _freed(block: int) -> MemoryEvent:
    return MemoryEvent(block, -1, 0)


def _sizes(blocks: Iterable[int], made: dict[int, MemoryEvent]) -> Counter[tuple[int, int]]:
    return Counter((made[block].nbytes, made[block].stream) for block in blocks)
