"""All-reduces that a step launches and waits for later, as ``DistributedDataParallel`` does.

NCCL runs them on a stream of its own: it waits for what the launching stream has done, and whoever waits for
the work lets their own stream wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtune_adaptive.planner.trace.fake_device import (
    FakeEvent,
    FakeStream,
    current_stream,
    in_stream,
)


class AsyncReductions:
    """The stream of a rank's asynchronous all-reduces."""

    def __init__(self) -> None:
        self._stream: FakeStream | None = None

    def instead_of(self, all_reduce: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.distributed.all_reduce``, with which asynchronous ones run on their stream."""

        def launched(
            tensor: torch.Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> dist.Work | None:
            if not async_op:
                work: dist.Work | None = all_reduce(tensor, op, group)
                return work
            self._stream = self._stream or FakeStream()
            self._stream.wait_stream(current_stream())
            with in_stream(self._stream):
                all_reduce(tensor, op, group, async_op=True)
            return _Launched(self._stream.record_event())

        return launched


class _Launched(dist.Work):
    """An all-reduce that has been launched."""

    def __init__(self, done: FakeEvent) -> None:
        super().__init__()
        self._done = done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._done.wait(current_stream())
        return True
