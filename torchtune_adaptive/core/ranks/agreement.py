"""The ranks of a run, and how they agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchtune_adaptive.common import RankLost, launcher, network

T = TypeVar("T")
_ONE_COLLECTIVE = 7
"""Ranks up to which all exchange numbers in one all-reduce.

gloo's is a ring, of 2 (N - 1) messages one after the other. With more ranks, rank 0 collects the numbers and
broadcasts the answer, along a tree: about log N messages, but two operations.
"""
_SETTLING = 0.1  # seconds; what it waits for takes microseconds on a machine that is not loaded
_COMPILING = timedelta(hours=1)  # a rank may have cached what another one compiles

_TOO_LATE = "Timed out waiting"
# What collectives say when a peer is gone. Anything else is this rank's own error.
_LOST_PEER_TEXTS = (
    _TOO_LATE,
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
)


class Ranks:
    """The ranks of a run, and which of them this is.

    They agree through a gloo group, on the CPU and never on the device. Without a process group there is one
    rank.

    Args:
        timeout: seconds after which a rank that does not answer is lost; by default, as long as the process
            group waits.
        compiled: whether ranks compile; then they wait an hour by default, if that is longer.
    """

    communicate = True
    """Whether there are other ranks; where a step is only traced, there are not."""

    def __init__(self, timeout: float | None = None, compiled: bool = False) -> None:
        self.rank, self.size = 0, 1
        if dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group, self._patience = None, timedelta()
        if self.size > 1:
            network.let_gloo_use_the_interface_of_nccl()
            self._patience = _patience(compiled) if timeout is None else timedelta(seconds=timeout)
            self._group = _new_group(self._patience)
        self._begin([*range(self.size)])

    def _begin(self, members: list[int]) -> None:
        self.members = frozenset(members)
        """These ranks, by their numbers in the run."""
        self._parts: list[Ranks] = []
        self._pending: Callable[[], object] | None = None  # waits for an exchange that has begun
        if len(members) > 1:
            self._ends = torch.zeros(2, dtype=torch.int64)
            self._ends_value = self._ends.numpy()  # the same memory
            self._number = torch.zeros(1, dtype=torch.int64)
            everyones = torch.zeros(len(members), dtype=torch.int64)
            self._numbers, self._numbers_value = [*everyones.view(-1, 1)], everyones.numpy()

    def alike(self, value: Hashable) -> Ranks:
        """The ranks that pass the same value as this one; they agree in a group of their own."""
        values = self.gather(value)
        for each in dict.fromkeys(values):
            members = [rank for rank, other in enumerate(values) if other == each]
            group = None
            if len(members) > 1:  # every rank takes part in making every group
                group = _new_group(self._patience, members)
            if each == value:
                part = SomeRanks(members, self.rank, group, self._patience)
        self._parts.append(part)
        return part

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
        return self.begin_spread(number)()

    def begin_spread(self, number: int) -> Callable[[], tuple[int, int]]:
        """Begin ``spread``; gives the function that waits for what it gives.

        Meanwhile this rank may do anything else, its other exchanges included: those end this one first.
        """
        if self._group is None:
            return lambda: (number, number)
        self._wait_for_pending()
        begin = self._begin_ring if self.size <= _ONE_COLLECTIVE else self._begin_tree
        wait = self._call(begin, number)
        ends: list[int] = []

        def end() -> tuple[int, int]:
            if not ends:
                self._pending = None
                self._call(wait)
                ends.extend(self._ends_value.tolist())
            return -ends[0], ends[1]

        self._pending = end
        return end

    def _begin_ring(self, number: int) -> Callable[[], Any]:
        self._ends_value[:] = -number, number
        options = {"op": dist.ReduceOp.MAX, "group": self._group}
        return dist.all_reduce(self._ends, async_op=True, **options).wait

    def _begin_tree(self, number: int) -> Callable[[], Any]:
        self._number.fill_(number)
        collect = partial(dist.gather, self._number, group=self._group, group_dst=0, async_op=True)
        tell = partial(dist.broadcast, self._ends, group=self._group, group_src=0, async_op=True)
        if self.rank > 0:
            works = collect(), tell()
            return lambda: [work.wait() for work in works]
        collected = collect(self._numbers)

        def answer() -> None:
            collected.wait()
            self._ends_value[:] = -self._numbers_value.min(), self._numbers_value.max()
            tell().wait()

        return answer

    def _wait_for_pending(self) -> None:
        if self._pending is not None:
            self._pending()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self._group is None:
            return [value] * self.size
        values: list[T | None] = [None] * self.size
        self._exchange(dist.all_gather_object, values, value)
        return values  # type: ignore[return-value]

    def gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Every rank's tensor of one shape, stacked; on rank 0, and None on the others."""
        if self._group is None:
            return tensor.expand(self.size, *tensor.shape)
        if self.rank > 0:
            self._exchange(dist.gather, tensor, group_dst=0)
            return None
        found = tensor.new_empty(self.size, *tensor.shape)
        self._exchange(dist.gather, tensor, [*found], group_dst=0)
        return found

    def fill_from_rank_zero(self, tensor: torch.Tensor) -> None:
        """Make a tensor what it is on rank 0."""
        if self._group is not None:
            self._exchange(dist.broadcast, tensor, group_src=0)

    def from_rank_zero(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self._group is None:
            return value
        values = [value]
        self._exchange(dist.broadcast_object_list, values, src=0)
        return values[0]

    def _exchange(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self._wait_for_pending()
        self._call(partial(collective, *arguments, group=self._group, **options))

    def _call(self, exchange: Callable[..., T], *arguments: Any) -> T:
        """Call what exchanges something; raises ``RankLost`` where another rank does not answer."""
        try:
            return exchange(*arguments)
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            why = "another rank has ended, or this one came later than its timeout; it says which"
            if _TOO_LATE in str(error):
                why = (
                    f"timeout: another rank has not answered for {self._patience.total_seconds():g} s. If it "
                    "is only late, because it saves, evaluates or compiles alone, pass a larger timeout; if "
                    "not, it hangs, or its machine is gone"
                )
            raise RankLost(f"{why}.") from error

    def close(self) -> None:
        """Leave the group, at the end of the run and before the default group is destroyed.

        A gloo thread takes the interpreter's lock to drop the tensors of its last collective, and aborts the
        process if the interpreter has ended by then. The threads of this group end here. Those of a group
        that something else still refers to (a device mesh does) get a moment in which the lock is free.
        """
        for part in self._parts:
            part.close()
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


class SomeRanks(Ranks):
    """Some of the ranks of a run, by their numbers in it, which agree in a group of their own.

    By default it is this rank alone.
    """

    def __init__(
        self,
        members: Sequence[int] = (),
        rank: int | None = None,
        group: dist.ProcessGroup | None = None,
        patience: timedelta = timedelta(),
    ) -> None:
        if rank is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
        members = [*members] or [rank]
        self.rank, self.size = members.index(rank), len(members)
        self._group, self._patience = group, patience
        self._begin(members)


def _new_group(patience: timedelta, members: list[int] | None = None) -> dist.ProcessGroup:
    return dist.new_group(members, backend="gloo", timeout=patience, group_desc=launcher.OWN_GROUP)


def _patience(compiled: bool) -> timedelta:
    """The time that ranks wait for each other where nobody says how long."""
    world = dist.group.WORLD
    assert world is not None
    # As ``init_process_group`` has set it; torch has no other public way to ask a group.
    own: timedelta = world.get_group_store().timeout  # type: ignore[attr-defined]
    return max(own, _COMPILING) if compiled else own


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether a collective has failed because of another rank."""
    texts = (text in str(error) for text in _LOST_PEER_TEXTS)
    return isinstance(error, RankLost) or (isinstance(error, RuntimeError) and any(texts))
