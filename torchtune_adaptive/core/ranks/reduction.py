"""The ways in which the gradients of all ranks become those of a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core.ranks import fsdp
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.ranks.buckets import Buckets
from torchtune_adaptive.core.ranks.collectives import Collectives
from torchtune_adaptive.core.ranks.supported import is_split, wrapped_in

_NO_CONTEXT = nullcontext()


class Reduction:
    """FSDP reduces the gradients of each micro-batch in its backward, to their mean over the ranks.

    Args:
        averaged_over: the number that their sum over the ranks is divided by: the number of ranks, unless the
            caller has set another; 1 if they are summed.
    """

    in_last = False
    """Whether gradients of all micro-batches are reduced together, in the backward pass of the last one or,
    if nobody says which that is, by ``place``."""

    places = False
    """Whether something is launched by ``place``, after all micro-batches of a step."""

    needs_last = False
    """Whether a step must be told its last micro-batch: nothing else reduces gradients."""

    takes_as_much_from = 2
    """The micro-batch of a step from which on the next ones, but the last, take as much memory."""

    fingerprint: int | None = None
    """A number of 20 bits that tells which parameters have a gradient of this rank, where that matters."""

    memory: Sequence[torch.Tensor] = ()
    """The memory that gradients have even before a step."""

    def __init__(self, averaged_over: float) -> None:
        self.averaged_over = averaged_over

    def begin(self) -> None:
        """Begin a step, also after one that was given up."""

    def apart(self) -> AbstractContextManager[None]:
        """The context in which forward and backward run."""
        return _NO_CONTEXT

    def backward(self, loss: torch.Tensor, collectives: Collectives, last: bool) -> None:
        """Go backward. ``last`` says that this is the last micro-batch, where gradients are reduced in it."""
        loss.backward()

    def place(self, parameters: Sequence[nn.Parameter], collectives: Collectives) -> None:
        """Launch what turns gradients into those of the parameters, after all micro-batches."""

    def wait(self) -> None:
        """Wait until all gradients are reduced."""

    def settle(self, alike: bool) -> None:
        """Look at what the ranks have told each other: whether all have the same ``fingerprint``.

        Raises:
            UsageError: on every rank, if they have gradients of different parameters, and must not.
        """


class WithLast(Reduction):
    """FSDP adds up the gradients of a rank, whole, and reduces them in backward of the last micro-batch.

    That is what it does where ``set_requires_gradient_sync`` is off for the others. What each micro-batch
    launches depends on whether it is the last, which is a kind of pass of its own.
    """

    in_last = needs_last = True
    takes_as_much_from = 3  # the first finds no gradients, and what the last has reduced is gone

    def __init__(self, model: nn.Module, averaged_over: float) -> None:
        super().__init__(averaged_over)
        self._sharded = [each for each in model.modules() if isinstance(each, FSDPModule)]

    def backward(self, loss: torch.Tensor, collectives: Collectives, last: bool) -> None:
        if last:  # as it is outside of a step
            return loss.backward()
        self._set_sync(False)
        try:
            loss.backward()
        finally:
            self._set_sync(True)

    def _set_sync(self, sync: bool) -> None:
        for module in self._sharded:  # each by itself: FSDP would go through all modules for them
            module.set_requires_gradient_sync(sync, recurse=False)


class SplitLayers(Reduction):
    """Tensor parallelism alone: all ranks have the same rows, so there is nothing to average.

    But where activations are split, the gradient of a parameter that is not is left as each rank's term of a
    sum; and one of an embedding that is split may be whole. FSDP places both by itself.
    """

    places = True

    def place(self, parameters: Sequence[nn.Parameter], collectives: Collectives) -> None:
        for parameter in parameters:
            gradient = parameter.grad
            if (
                isinstance(parameter, DTensor)
                and isinstance(gradient, DTensor)
                and gradient.placements != parameter.placements
            ):
                parameter.grad = gradient.redistribute(placements=parameter.placements)


class Replicas(Reduction):
    """Every rank has a copy of the whole model, wrapped in ``DistributedDataParallel``.

    That reduces gradients during backward, and cannot be reset after an exception in it. So micro-batches
    run without its reduction (``no_sync``, as accumulation does), and gradients are reduced in buckets of
    ours; see Note [Buckets instead of DDP's] in ``ranks.buckets``.
    """

    in_last = places = True

    def __init__(self, wrapped: DistributedDataParallel, ranks: Ranks) -> None:
        super().__init__(averaged_over=1)
        self._wrapped = wrapped
        self._ranks = ranks
        self._buckets = Buckets.of(wrapped)
        self._works: list[dist.Work] = []
        self.memory = self._buckets.tensors

    def begin(self) -> None:
        self.wait()  # or the step that was given up would still write where the next one does
        self._buckets.begin()

    def apart(self) -> AbstractContextManager[None]:
        self._buckets.expected = False
        return self._wrapped.no_sync()

    def backward(self, loss: torch.Tensor, collectives: Collectives, last: bool) -> None:
        launch = partial(self._launch, collectives) if last else None
        # Where a pass launches nothing else, they may come at any time: their order is always the same.
        self._buckets.backward(loss, launch, early=collectives.foreseen)

    def place(self, parameters: Sequence[nn.Parameter], collectives: Collectives) -> None:
        self._buckets.complete(partial(self._launch, collectives))

    def _launch(self, collectives: Collectives, number: int) -> None:
        group = self._wrapped.process_group
        call = partial(self._buckets.all_reduce, number, group=group, async_op=True)
        self._works.append(collectives.watch(call))

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()

    @property
    def fingerprint(self) -> int:  # type: ignore[override]
        missing = self._buckets.missing
        return 1 + crc32(repr(missing).encode()) % ((1 << 20) - 1) if missing else 0

    def settle(self, alike: bool) -> None:
        """Drop, too, what was filled with zeros and no rank has used, as the optimizer leaves that alone."""
        missing = self._buckets.missing
        if not self._wrapped.find_unused_parameters:
            if not alike:
                raise UsageError(
                    "model: in a step, some parameters had a gradient on one rank and not on another, so "
                    "they cannot be summed. Let every parameter take part in every loss, if only with the "
                    "factor 0, or pass find_unused_parameters=True to DistributedDataParallel."
                )
            return
        of_ranks = [missing] if alike else self._ranks.gather(missing)
        for place in set(missing).intersection(*of_ranks):
            self._buckets.parameters[place].grad = None


def reduction_of(
    model: nn.Module, ranks: Ranks, holders: Ranks, each_batch: bool = True
) -> Reduction:
    """The way in which the gradients of a model are reduced.

    Args:
        holders: the ranks with the same rows.
        each_batch: whether FSDP reduces those of each micro-batch.
    """
    if wrapped := wrapped_in(model):
        return Replicas(wrapped, ranks)
    averaged_over = fsdp.divisor(model) or ranks.size // holders.size
    if not each_batch and fsdp.roots(model):
        return WithLast(model, averaged_over)
    kind = SplitLayers if is_split(model) and not fsdp.roots(model) else Reduction
    return kind(averaged_over)
