"""A process group for ranks that share one GPU, which NCCL refuses: collectives go through the CPU and gloo.

It exists to run FSDP's real streams, allocations and hooks on several ranks where there is one device. Like
NCCL's, its collectives take their place in the current stream: what they read is complete, and what follows
on the stream finds their result.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

NAME = "staging"


def init_staging_group() -> None:
    """Join the default process group, with staged collectives; for launched ranks."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
    dist.init_process_group(NAME)


def _create(store: Any, rank: int, ranks: int, timeout: timedelta) -> StagingGroup:
    return StagingGroup(store, rank, ranks, timeout)


class StagingGroup(dist.ProcessGroup):
    """The collectives that FSDP and torchtune use, each a synchronous one of gloo on copies."""

    def __init__(self, store: Any, rank: int, ranks: int, timeout: timedelta) -> None:
        super().__init__(rank, ranks)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore(NAME, store), rank, ranks, timeout)
        self.collectives = 0

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:  # type: ignore[override]  # C++ keeps it in a backend; here is none
        return dist.distributed_c10d._world.pg_names[self]

    def _get_sequence_number_for_group(self) -> int:
        return self.collectives  # as gloo and NCCL count in C++

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            tensor.copy_(self._reduced(tensor, opts))
        return self._done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        for tensor in tensors:
            staged = tensor.cpu().contiguous()
            self._gloo.broadcast([staged], opts).wait()
            tensor.copy_(staged)
        return self._done(tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        for gathered, mine in zip(outputs, inputs, strict=True):
            for output, part in zip(gathered, self._gathered(mine), strict=True):
                output.copy_(part)
        return self._done(outputs)

    def all_gather_single(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Any:
        output.copy_(torch.cat([part.flatten() for part in self._gathered(mine)]).view_as(output))
        return self._done(output)

    def reduce_scatter_single(
        self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None
    ) -> Any:
        parts = self._reduced(mine, opts).flatten().chunk(self.size())
        output.copy_(parts[self.rank()].view_as(output))
        return self._done(output)

    _allgather_base = all_gather_single  # their names before torch 2.13
    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.allreduce(torch.zeros(1)).wait()
        return self._done(None)

    def _reduced(self, tensor: torch.Tensor, opts: Any) -> torch.Tensor:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        average = op == dist.ReduceOp.AVG  # gloo has none
        staged = tensor.cpu().clone().contiguous()
        self._gloo.allreduce([staged], _options(dist.ReduceOp.SUM if average else op)).wait()
        return staged / self.size() if average else staged

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        staged = tensor.cpu().contiguous()
        parts = [torch.empty_like(staged) for _ in range(self.size())]
        self._gloo.allgather([parts], [staged]).wait()
        return parts

    def _done(self, result: Any) -> Any:
        self.collectives += 1
        future: Future[Any] = Future()
        future.set_result(result)
        return _create_work_from_future(future)


def _options(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options
