"""Models that every rank has whole: their gradients are reduced once, when all ranks have theirs.

``DistributedDataParallel`` reduces gradients during backward, and cannot be reset after an exception in it.
So micro-batches run without its reduction (``no_sync``, as accumulation does), and none of them has a
collective that another rank could wait in. Then the ranks agree that no one has failed, and reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core.ranks.agreement import Ranks


class Replicas:
    """A model wrapped in ``DistributedDataParallel``, and its copies on the other ranks."""

    def __init__(self, wrapped: DistributedDataParallel, ranks: Ranks) -> None:
        self._wrapped = wrapped
        self._ranks = ranks

    def apart(self) -> AbstractContextManager[None]:
        """Forward and backward without communication."""
        return self._wrapped.no_sync()

    def all_are_ready(self, failed: bool, has_gradient: Iterable[bool]) -> bool:
        """Whether no rank has failed; the ranks meet here before they reduce.

        Args:
            failed: whether this one has.
            has_gradient: for each trained parameter.

        Raises:
            UsageError: on every rank, if they have gradients of different parameters.
        """
        least, most = self._ranks.spread(-1 if failed else crc32(bytes(has_gradient)))
        if least < 0:
            return False
        if least != most:
            raise UsageError(
                "model: in a step, some parameters had a gradient on one rank and not on another, so they "
                "cannot be summed. Let every parameter take part in every loss, if only with the factor 0."
            )
        return True

    def reduce(self, gradients: Sequence[torch.Tensor]) -> None:
        """Replace each gradient by its sum over all ranks, in place: this takes no memory."""
        pending = [
            dist.all_reduce(gradient, group=self._wrapped.process_group, async_op=True)
            for gradient in gradients
        ]
        for work in pending:
            assert work is not None
            work.wait()


def wrapped_in(model: nn.Module) -> DistributedDataParallel | None:
    """The wrapper in a model, which may be wrapped again, as by Lightning Fabric or ``torch.compile``."""
    return next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
