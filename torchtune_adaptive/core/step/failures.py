"""Running out of memory in a step, on one of many ranks.

Note [Failure before a collective]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank that stops in the middle of a step leaves the others waiting in the next collective. So it goes on to
the exchange, and makes up for the collectives that it has missed. They are, in this order:

1. In each forward and backward, those of FSDP, of tensor parallelism, and of the model itself. A failure may
   come anywhere, even between a collective's launch and its end. The rank drops what the step has made, which
   makes room, and launches the rest of the stage on scratch buffers (``Collectives.finish``). While the
   sequence is being recorded, nobody knows the rest. So the ranks agree on the host before each collective;
   the others raise ``AnotherRankFailed`` instead of entering it, and all of those that agree know. Gradients
   that tensor parallelism left as terms of a sum are summed in a pass of its own after the last backward.
   With replicas, these are the buckets of gradients, in the last backward or, where noise is measured or
   nobody says which backward is the last, in a pass of their own after it.
2. The exchange (``Exchange``), a step's one all-reduce of its own. A rank that has failed before, the norm of
   the gradient included, says so in it. Its buffer exists from the beginning. Where all know already, it is
   left out by all.
3. In a lost step only: the ranks tell each other, on the host, where they failed.

After a healthy exchange all ranks change their parameters. A failure then is tried again as long as nothing
has changed (``Failures.insist``), and then raises ``StepHalfApplied``; no collective follows in which others
would wait. Where optimizers step in backward, the exchange comes before backward, and so does the point of no
return.

What ranks agree about on the host takes no device memory, so it cannot fail for want of it.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import DistError
from torch.distributed.tensor import DTensor

from torchtune_adaptive.common import AdaptiveBatchingError, TrainingOutOfMemory
from torchtune_adaptive.core.device.memory import DeviceMemory, is_out_of_memory
from torchtune_adaptive.core.private import (
    AsyncCollectiveTensor,
    tree_leaves,
    unfinished_works,
    without_modes,
)
from torchtune_adaptive.core.ranks.collectives import AnotherRankFailed, Collectives
from torchtune_adaptive.core.ranks.communicators import of_communicator


def _within(context: AbstractContextManager[object], work: Callable[..., Any], *given: Any) -> Any:
    with context:
        return work(*given)


class StepHalfApplied(Exception):
    """Memory ran out where parameters may have changed already.

    ``stage`` says where, ``here`` whether it was on this rank, and ``everywhere`` whether all ranks know.
    """

    def __init__(self, stage: str, here: bool = True, everywhere: bool = False) -> None:
        self.stage = stage
        self.here = here
        self.everywhere = everywhere
        super().__init__(f"out of memory in the {stage}{'' if here else ' of another rank'}")


@dataclass
class Failures:
    """The failures in a step that this rank knows of, and what it does after its own."""

    collectives: Collectives
    memory: DeviceMemory
    survive: bool
    """Whether a step in which memory runs out is discarded; otherwise the error is raised as it is."""
    forget: Callable[[], None]
    """Function that drops everything that the step has made on this rank."""

    stage: str = field(init=False, default="forward")
    """The stage that the step is in."""
    here: str | None = field(init=False, default=None)
    """The stage in which this rank ran out of memory, if it did."""
    beside: bool = field(init=False, default=False)
    """Whether another rank that holds the same rows did, and only those know."""
    known: bool = field(init=False, default=False)
    """Whether a rank ran out of memory and every rank knows."""
    survives_errors: bool = field(init=False, default=False)
    """Whether a step is discarded, too, where what it calls raises another error; until the step ends."""
    error: str = field(init=False, default="")
    """That error, if it came on this rank."""
    none: bool = field(init=False, default=True)
    """Whether this rank knows of no failure: kept, and not derived, as each micro-batch asks six times."""

    def begin(self) -> None:
        """Begin a step."""
        self.here, self.beside, self.known, self.none = None, False, False, True
        self.survives_errors, self.error = False, ""

    def all_know(self) -> None:
        """Note a failure that every rank knows of."""
        self.known, self.none = True, False

    def do(self, stage: str, work: Callable[..., None], *arguments: Any) -> None:
        """Do one stage of a pass or, on a rank that ran out of memory, launch its collectives only."""
        if self.none:
            if (recorder := self.collectives.begin_stage(stage)) is None:
                self._attempt(stage, work, *arguments)
            else:
                self._attempt(stage, _within, recorder, work, *arguments)
            if self.none:
                self.collectives.end_stage()
                return
        if not self.known:
            self.known = self._finish(stage)

    def end_pass(self) -> None:
        """End a pass."""
        self._listen(self.collectives.end_pass)

    def look_elsewhere(self) -> None:
        """Learn, between stages, of a failure that all will know of."""
        self._listen(self.collectives.look_elsewhere)

    def _listen(self, ask: Callable[[], None]) -> None:
        if self.none:
            try:
                ask()
            except AnotherRankFailed as other:
                self._heard(other)
            if self.beside:
                self.forget()

    def _heard(self, other: AnotherRankFailed) -> None:
        self.known, self.beside, self.none = other.everywhere, not other.everywhere, False

    def attempt(self, stage: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do something that can still be discarded; None if it failed, or something before it did."""
        return self._attempt(stage, work, *arguments) if self.none else None

    def _attempt(self, stage: str, work: Callable[..., Any], *arguments: Any) -> Any:
        self.stage = stage
        try:
            with self.memory.running():
                return work(*arguments)
        except AnotherRankFailed as other:
            settle(other)
            self._heard(other)
        except Exception as error:
            if not self.is_survived(error):
                if shortage := of_communicator(error):  # of a group that only the model knows
                    raise shortage from error
                ours = isinstance(error, (AdaptiveBatchingError, DistError))
                if ours or not self.survives_errors:
                    raise
                self.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
            settle(error)
            self.here, self.none = stage, False
        # Only now is the exception gone, and with it the frames that held the step's tensors.
        self.forget()
        return None

    def insist(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Try again if memory runs out: from here on, the other ranks rely on this one's step.

        A product in place needs no memory. What may fail for want of it is loading its kernel, before
        anything is multiplied.
        """
        try:
            work(*arguments)
        except Exception as error:
            if not self.is_survived(error):
                raise
            self.memory.release()
            work(*arguments)

    def is_survived(self, error: Exception) -> bool:
        return self.survive and is_out_of_memory(error)

    def _finish(self, stage: str) -> bool:
        """Launch what the other ranks wait for; whether they know of the failure then."""
        try:
            return self.collectives.finish(stage)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingOutOfMemory(
                f"Out of memory in {self.here}, and again in the buffers of the collectives that the "
                "other ranks wait for: the step cannot be retried. Keep the device for this process, or use "
                f"a smaller batch_size. ({error})",
                everywhere=False,
            ) from error


def drop_unfinished(device: torch.device) -> None:
    """Make autograd let go of what a backward pass that failed had yet to do.

    Its engine keeps the nodes that were ready, and through them the graph and its tensors, until it is used
    again. So it is used: on an empty tensor, which needs no memory.
    """
    with torch.enable_grad():
        empty = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(empty.view(-1), empty, empty.detach())


@torch.no_grad()
def settle(error: BaseException) -> None:
    """Wait for functional collectives that a failure has left between launch and wait, while the error's
    frames still hold them.

    torch keeps the work of such a collective, and with it the memory of its result, until somebody waits.
    What only an expression held, such as the results so far of a list comprehension, is gone by now.
    """
    if not unfinished_works():
        return
    with without_modes():
        for tensor in _held_by_frames(error):
            _wait(tensor)
        for each in gc.get_objects():
            if type(each) is AsyncCollectiveTensor and not each.completed:
                _wait(each)


def _held_by_frames(error: BaseException) -> Iterator[torch.Tensor]:
    trace = error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        held = frame.f_locals
        values = [*held.values()]
        if isinstance(held, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            held.clear()  # a copy, until Python 3.12, that the frame would keep, and with it the error
        for value in values:
            if isinstance(value, (torch.Tensor, list, tuple, dict)):
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _wait(tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        return _wait(tensor.to_local())
    if type(tensor) is AsyncCollectiveTensor:
        tensor = tensor.elem
    if type(tensor) is torch.Tensor:
        torch.ops._c10d_functional.wait_tensor(tensor)
