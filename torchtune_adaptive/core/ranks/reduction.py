"""The ways in which the gradients of all ranks become those of a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from zlib import crc32

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core.ranks import fsdp
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.ranks.supported import is_split, wrapped_in

_NO_CONTEXT = nullcontext()


class Reduction:
    """FSDP reduces the gradients of each micro-batch in its backward, to their mean over the ranks.

    Args:
        averaged_over: the number that their sum over the ranks is divided by: the number of ranks, unless the
            caller has set another; 1 if they are summed.
    """

    after_backward = False
    """Whether gradients are reduced in ``finish``, and not in the backward pass of each micro-batch."""

    places = False
    """Whether gradients are placed, by ``place``, after all micro-batches of a step."""

    def __init__(self, averaged_over: float) -> None:
        self.averaged_over = averaged_over

    def apart(self) -> AbstractContextManager[None]:
        """The context in which forward and backward run."""
        return _NO_CONTEXT

    def place(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give each gradient the placement of its parameter. This launches collectives."""

    def finish(self, parameters: Sequence[nn.Parameter], failed: bool) -> bool:
        """Reduce what is not reduced yet, after all micro-batches of a step.

        Args:
            parameters: the parameters that are trained.
            failed: whether this rank has failed, which others may not know.

        Returns:
            False if nothing was reduced, because a rank has failed; then all know.
        """
        return True


class SplitLayers(Reduction):
    """Tensor parallelism alone: all ranks have the same rows, so there is nothing to average.

    But where activations are split, the gradient of a parameter that is not is left as each rank's term of a
    sum; and one of an embedding that is split may be whole. FSDP places both by itself.
    """

    places = True

    def place(self, parameters: Sequence[nn.Parameter]) -> None:
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
    run without its reduction (``no_sync``, as accumulation does), and none of them has a collective that
    another rank could wait in; see Note [Failure before a collective] in ``step.failures``.
    """

    after_backward = True

    def __init__(self, wrapped: DistributedDataParallel, ranks: Ranks) -> None:
        super().__init__(averaged_over=1)
        self._wrapped = wrapped
        self._ranks = ranks

    def apart(self) -> AbstractContextManager[None]:
        return self._wrapped.no_sync()

    def finish(self, parameters: Sequence[nn.Parameter], failed: bool) -> bool:
        """Replace each gradient by its sum over all ranks, in place: this takes no memory.

        Raises:
            UsageError: on every rank, if they have gradients of different parameters.
        """
        gradients = [parameter.grad for parameter in parameters]
        fingerprint = crc32(bytes(gradient is not None for gradient in gradients))
        least, most = self._ranks.spread(-1 if failed else fingerprint)
        if least < 0:
            return False
        if least != most:
            raise UsageError(
                "model: in a step, some parameters had a gradient on one rank and not on another, so they "
                "cannot be summed. Let every parameter take part in every loss, if only with the factor 0."
            )
        pending = [
            dist.all_reduce(gradient, group=self._wrapped.process_group, async_op=True)
            for gradient in gradients
            if gradient is not None
        ]
        for work in pending:
            assert work is not None
            work.wait()
        return True


def reduction_of(model: nn.Module, ranks: Ranks, holders: Ranks) -> Reduction:
    """The way in which the gradients of a model are reduced; ``holders`` are the ranks with the same rows."""
    if wrapped := wrapped_in(model):
        return Replicas(wrapped, ranks)
    averaged_over = fsdp.divisor(model) or ranks.size // holders.size
    kind = SplitLayers if is_split(model) and not fsdp.roots(model) else Reduction
    return kind(averaged_over)
