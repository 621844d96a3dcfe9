"""Buckets besides the gradients, for plans of steps in which ``DistributedDataParallel`` has its own."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from torchtune_adaptive.core.ranks.buckets import Buckets


class DdpBuckets(Buckets):
    """Buckets as DDP has them without ``gradient_as_bucket_view``.

    It leaves gradients alone until the last micro-batch. There it copies each into its bucket when it is
    complete, and the sums back when all have come.
    """

    def fill(self, place: int) -> None:
        gradient = self.parameters[place].grad
        if self.is_last and gradient is not None:
            self.views[place].copy_(gradient)

    def all_reduce(
        self, number: int, *, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        work = super().all_reduce(number, group=group, async_op=async_op)
        places = self.members[number]
        gradients = [(self.parameters[place].grad, self.views[place]) for place in places]
        return _CopiedBack(work, gradients)


class _CopiedBack(dist.Work):
    """The reduction of a bucket, which ends with a copy of each sum into its gradient."""

    def __init__(
        self, work: dist.Work | None, sums: list[tuple[torch.Tensor | None, torch.Tensor]]
    ) -> None:
        super().__init__()
        self._work, self._sums = work, sums

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done = self._work is None or self._work.wait()
        for gradient, its_sum in self._sums:
            if gradient is not None:
                gradient.copy_(its_sum)
        return done
