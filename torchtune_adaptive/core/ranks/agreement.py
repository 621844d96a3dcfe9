"""The ranks of a run, and how they agree."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_SETTLING = 0.1  # seconds; what it waits for takes microseconds on a machine that is not loaded


class Ranks:
    """The ranks of a run, and which of them this is.

    They agree through a gloo group, on the CPU and never on the device. Every wait is bounded: if a rank does
    not answer within ``timeout`` seconds, the others fail. Without a process group there is one rank.
    """

    def __init__(self, timeout: float = 45.0) -> None:
        self.rank, self.size = 0, 1
        if dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = None
        if self.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._ends = torch.zeros(2, dtype=torch.int64)
        self._ends_value = self._ends.numpy()  # the same memory

    @property
    def is_zero(self) -> bool:
        """Whether this is the rank that writes files and logs for all."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank."""
        return bool(self.spread(flag)[1])

    def spread(self, number: int) -> tuple[int, int]:
        """The smallest and the largest of the ranks' numbers.

        Nothing here can run out of memory: a failure after the all-reduce would have to be announced by a
        second one, which the others would take for the answer to another question.
        """
        if self._group is None:
            return number, number
        self._ends_value[:] = -number, number
        dist.all_reduce(self._ends, op=dist.ReduceOp.MAX, group=self._group)
        return -int(self._ends_value[0]), int(self._ends_value[1])

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self._group is None:
            return [value] * self.size
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]

    def from_rank_zero(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def close(self) -> None:
        """Leave the group, at the end of the run and before the default group is destroyed.

        A gloo thread takes the interpreter's lock to drop the tensors of its last collective, and aborts the
        process if the interpreter has ended by then. The threads of this group end here. Those of a group
        that something else still refers to (a device mesh does) get a moment in which the lock is free.
        """
        if self._group is not None:
            group, self._group = self._group, None
            dist.destroy_process_group(group)
            del group
            time.sleep(_SETTLING)

    @staticmethod
    def leave_all_groups() -> None:
        """Destroy every process group, and let their threads end; see ``close``."""
        dist.destroy_process_group()
        time.sleep(_SETTLING)
