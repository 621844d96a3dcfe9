"""The gradients of replicas, in buckets that are summed over the ranks while backward goes on.

Note [Buckets instead of DDP's]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``DistributedDataParallel`` sums gradients in the last backward pass of a step, in buckets of its own. A rank
that runs out of memory there cannot set it back, nor complete what the others wait for. So its gradients are
parts of buckets of ours, and it gives up its reducer, with the memory of its buckets:

- A gradient that autograd has accumulated is copied into its bucket, and is a view of it from then on. So a
  step takes no more memory than one of DDP with ``gradient_as_bucket_view``.
- In the last micro-batch, a bucket is launched when its gradients are complete, in an order that never
  changes. What is not complete at the end of backward is launched then; a gradient that did not come counts
  as zeros. So each rank launches the same, whatever it has computed.
- A bucket is there whatever happens, so a rank without memory completes the sequence with it.
- Memory may run out in the very call that launches a bucket. Then nobody has the work to wait for, and a
  thread of gloo, or another stream, may still write there when the next step does. That one has new memory.

Buckets belong to the wrapper, and stay when the step is gone. Whoever goes backward through the wrapper then,
as in a loop of one's own, is told that nothing would be reduced: silence would train each rank for itself.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core import private

Launch = Callable[[int], None]
"""Function that launches the reduction of a bucket, given by its number."""

_FIRST_BYTES = 1 << 20
"""The size of the first bucket, as DDP has it: the ranks begin to communicate early."""


class Buckets:
    """The gradients of a model in ``DistributedDataParallel``; see Note [Buckets instead of DDP's]."""

    @classmethod
    def of(cls, wrapped: DistributedDataParallel) -> Buckets:
        """Those of a wrapper, which are made the first time."""
        parameters = [p for p in wrapped.parameters() if p.requires_grad]
        present = private.reduces_instead(wrapped)
        if isinstance(present, Buckets):
            if type(present) is cls and [*map(id, present.parameters)] == [*map(id, parameters)]:
                return present
            _remove(present.hooks)
        return cls(wrapped, parameters)

    def __init__(
        self, wrapped: DistributedDataParallel, parameters: Sequence[nn.Parameter]
    ) -> None:
        private.reduce_instead(wrapped, self)  # first, as it gives memory back
        self.parameters = parameters
        self.missing: list[int] = []
        """The places of parameters that have no gradient of this rank, once all buckets are complete."""
        self.expected = False
        """Whether the wrapper has run outside of a step, to go backward and reduce gradients."""
        self._wrapped = weakref.ref(wrapped)  # which refers to this
        self._fills = wrapped.find_unused_parameters
        members = _divided(parameters, wrapped.bucket_bytes_cap)
        self.members = members
        """The places of the parameters in each bucket."""
        self._bucket_of = {place: n for n, places in enumerate(members) for place in places}
        self.tensors = [_flat(self._in_bucket(number)) for number in range(len(members))]
        """The memory of each bucket."""
        self.views: dict[int, torch.Tensor] = {}
        """The part of it that is for each parameter, by its place."""
        for number in range(len(members)):
            self._divide(number)
        self._unsure: set[int] = set()
        """Buckets that may be on their way with nobody to wait for them."""
        self._in_step = False
        self.is_last = False
        """Whether the backward pass that runs, or ran last, is that of a step's last micro-batch."""
        self._outermost = -1
        self._nested: bool | None = (
            None  # whether backward has others in it; not known before the first
        )
        self._launch: Launch | None = None
        self.begin()
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, place))
            for place, parameter in enumerate(parameters)
        ]
        weakref.finalize(wrapped, _remove, self.hooks).atexit = False

    def begin(self) -> None:
        """Begin a step."""
        # What they had stays for a step: nobody else may be given it while something is written there.
        self._former = [self._renew(number) for number in self._unsure]
        self._unsure.clear()
        self.missing = []
        self._left = [len(places) for places in self.members]
        self._next = 0  # bucket to launch

    def all_reduce(
        self, number: int, *, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        """Replace a bucket by its sum over the ranks."""
        self._unsure.add(number)
        work = dist.all_reduce(self.tensors[number], group=group, async_op=async_op)
        self._unsure.remove(number)
        return work

    def _renew(self, number: int) -> torch.Tensor:
        """Give a bucket new memory; gives what it had."""
        former = self.tensors[number]
        self.tensors[number] = _flat(self._in_bucket(number))
        self._divide(number)
        return former

    def _divide(self, number: int) -> None:
        """Divide a bucket's memory among its parameters."""
        views = _views(self.tensors[number], self._in_bucket(number))
        self.views.update(zip(self.members[number], views, strict=True))

    def _in_bucket(self, number: int) -> list[nn.Parameter]:
        return [self.parameters[place] for place in self.members[number]]

    # --- backward -----------------------------------------------------------------------------------

    def backward(
        self, loss: torch.Tensor, launch: Launch | None = None, early: bool = False
    ) -> None:
        """Go backward.

        Args:
            loss: the loss of a micro-batch.
            launch: function that is called for each bucket, in the last micro-batch.
            early: whether it may be called while backward goes on.
        """
        self._in_step, self.is_last = True, launch is not None
        if self.is_last:
            loss.register_hook(self._begin_outermost)
            self._launch = launch if early and self._nested is False else None
        try:
            loss.backward()
        finally:
            self._in_step, self._launch = False, None
        if launch is not None:
            self._nested = bool(self._nested)
            self.complete(launch)

    def _begin_outermost(self, gradient: torch.Tensor) -> None:
        self._outermost = private.backward_running()

    def _accumulated(self, place: int, parameter: torch.Tensor) -> None:
        """Called by autograd when it has accumulated a gradient."""
        if not self._in_step:
            wrapped = self._wrapped()
            if self.expected and wrapped is not None and wrapped.require_backward_grad_sync:
                raise UsageError(
                    "model: backward through DistributedDataParallel outside of a step. AdaptiveStep reduces "
                    "the gradients of its model, and here they would differ between ranks. Let the step go "
                    "backward, wrap the model again, or accumulate gradients in no_sync()."
                )
            return
        if parameter.grad is not self.views[place]:
            self.fill(place)
        if not self.is_last:
            return
        if private.backward_running() != self._outermost:
            # In a backward within this one, as of reentrant checkpointing: there may be more to come.
            self._nested = True
            if self._bucket_of[place] < self._next:
                raise UsageError(
                    "model: reentrant checkpointing has added to a gradient that was complete, and on its "
                    "way to the other ranks. Pass use_reentrant=False, or turn it on before the first step."
                )
        elif self._launch is not None:
            self._left[self._bucket_of[place]] -= 1
            while self._next < len(self._left) and not self._left[self._next]:
                self._launch_next(self._launch)

    def fill(self, place: int) -> None:
        """Move a gradient into its bucket."""
        parameter, view = self.parameters[place], self.views[place]
        assert parameter.grad is not None
        view.copy_(parameter.grad)
        parameter.grad = view

    def _launch_next(self, launch: Launch) -> None:
        self._next += 1
        launch(self._next - 1)

    @torch.no_grad()
    def complete(self, launch: Launch) -> None:
        """Launch the buckets that are not launched yet, after backward."""
        while self._next < len(self.members):
            for place in self.members[self._next]:
                self._settle(place)
            self._launch_next(launch)

    def _settle(self, place: int) -> None:
        parameter, view = self.parameters[place], self.views[place]
        if parameter.grad is None:
            self.missing.append(place)
            view.zero_()
            if self._fills:
                parameter.grad = view
        elif parameter.grad is not view:
            self.fill(place)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _divided(parameters: Sequence[nn.Parameter], capacity: int) -> list[list[int]]:
    """The places of the parameters in each bucket, of one dtype on one device, in the order in which backward
    completes buckets: gradients come from the last parameter to the first."""
    full: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled: Counter[tuple[torch.dtype, torch.device]] = Counter()  # bytes
    for place in reversed(range(len(parameters))):
        parameter = parameters[place]
        kind = parameter.dtype, parameter.device
        filling.setdefault(kind, []).append(place)
        filled[kind] += parameter.nbytes
        if filled[kind] >= (capacity if full else min(_FIRST_BYTES, capacity)):
            full.append(filling.pop(kind))
            del filled[kind]
    return sorted([*full, *filling.values()], key=lambda places: -places[-1])


def _flat(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    number = sum(parameter.numel() for parameter in parameters)
    return torch.zeros(number, dtype=parameters[0].dtype, device=parameters[0].device)


def _views(flat: torch.Tensor, parameters: Sequence[nn.Parameter]) -> Iterator[torch.Tensor]:
    """A part of a bucket for each gradient, laid out as its parameter, as autograd and optimizers want it."""
    start = 0
    for parameter in parameters:
        layout = torch.empty_like(parameter, device="meta").stride()
        yield flat.as_strided(parameter.size(), layout, start)
        start += parameter.numel()
