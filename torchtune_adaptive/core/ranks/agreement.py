"""The ranks of a run, and how they agree.

Note [Connections]
~~~~~~~~~~~~~~~~~~
By itself, gloo connects each rank of a group with every other one: at a thousand ranks more sockets than many
systems let a process open, and a million reads of one key-value store. Our groups connect two ranks when
these first exchange something. The exchanges form a ring, a tree, or a star around rank 0, so all ranks but
that one have about log N connections.

But where one of the two has died by then, the other may wait for the connection, and gloo lets it wait for
five timeouts. So:

- The exchanges run once when a group is made. Afterwards each rank has its connections, and a peer that dies
  closes them, which is noticed at once.
- Before that, ranks wait for each other in the key-value store, in which a timeout is one.
- gloo's waits for connections have the timeout with which the group is made, and all others the one that it
  has when they begin. A group is made with a fifth, and set to the whole.

Each group has threads, connections and open files, which end with it. Whoever drops a step does not say so,
and ranks drop one at different times. So groups are kept for the process, and shared by all who agree among
the same ranks, each with a timeout of its own. All ranks make their exchanges in one order anyway.
"""

from __future__ import annotations

import atexit
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torchtune_adaptive.common import RankLost, launcher, network
from torchtune_adaptive.core import private

T = TypeVar("T")
_ONE_COLLECTIVE = 7
"""Ranks up to which all exchange numbers in one all-reduce.

gloo's is a ring, of 2 (N - 1) messages one after the other. With more ranks, rank 0 collects the numbers and
broadcasts the answer, along a tree: about log N messages, but two operations.
"""
_SETTLING = 0.1  # seconds; what it waits for takes microseconds on a machine that is not loaded
_COMPILING = timedelta(hours=1)  # a rank may have cached what another one compiles

_CONNECTS = 5
"""Timeouts of a group for which gloo waits until two of its ranks are connected (``Pair::waitUntil``)."""

_TOO_LATE = ("Timed out waiting", "Connect timeout")
_Groups = dict[tuple[int, ...], dist.ProcessGroup]
_shared: WeakKeyDictionary[dist.ProcessGroup, _Groups] = WeakKeyDictionary()
"""Our groups beside each default group, by their members."""
_timeouts: WeakKeyDictionary[dist.ProcessGroup, timedelta] = WeakKeyDictionary()
"""The timeouts that groups of ours have now."""

# What collectives say when a peer is gone. Anything else is this rank's own error.
_LOST_PEER_TEXTS = (
    *_TOO_LATE,
    "timed out connecting",
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
    _group: dist.ProcessGroup | None = None

    def __init__(self, timeout: float | None = None, compiled: bool = False) -> None:
        self.rank, self.size = 0, 1
        if dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._patience = timedelta()
        if self.size > 1:
            self._patience = _patience(compiled) if timeout is None else timedelta(seconds=timeout)
            self._group = _shared_group(self._patience)
        self._begin([*range(self.size)])

    def _begin(self, members: list[int]) -> None:
        self.members = frozenset(members)
        """These ranks, by their numbers in the run."""
        self._parts: list[Ranks] = []
        self._pending: Callable[[], object] | None = None  # waits for an exchange that has begun
        if len(members) > 1:
            self._ends = torch.zeros(2, dtype=torch.int64)
            everyones = torch.zeros(len(members), 2, dtype=torch.int64)
            self._everyones_ends = everyones, [*everyones]

    def alike(self, value: Hashable) -> Ranks:
        """The ranks that pass the same value as this one; they agree in a group of their own."""
        ranks_with: defaultdict[Hashable, list[int]] = defaultdict(list)
        for rank, each in enumerate(self.gather(value)):
            ranks_with[each].append(rank)
        for each, members in ranks_with.items():
            group = None
            # By every rank, and it waits for none that is not a member. With torch's
            # ``use_local_synchronization`` the members alone would make it, but under a name that counts
            # the groups which a rank is in: ranks in more groups than others would not find each other.
            if len(members) > 1:
                group = _shared_group(self._patience, members)
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
        self._ends.numpy()[:] = -number, number
        wait = self._call(self._begin_largest, self._ends, *self._everyones_ends)
        ends: list[int] = []

        def end() -> tuple[int, int]:
            if not ends:
                self._pending = None
                self._call(wait)
                ends.extend(self._ends.numpy().tolist())
            return -ends[0], ends[1]

        self._pending = end
        return end

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

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The largest of the ranks' numbers at each place; every rank has as many."""
        if self._group is None or not numbers:
            return [*numbers]
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self._wait_for_pending()
        everyones = own.new_empty(self.size, len(own))
        self._call(self._call(self._begin_largest, own, everyones, [*everyones]))
        return own.tolist()

    def _begin_largest(
        self, own: torch.Tensor, everyones: torch.Tensor, rows: list[torch.Tensor]
    ) -> Callable[[], Any]:
        """Begin to replace numbers by the largest of all ranks at each place; gives what waits for it.

        ``everyones`` has room for the numbers of all, and ``rows`` are its rows.
        """
        options: dict[str, Any] = {"group": self._group, "async_op": True}
        if self.size <= _ONE_COLLECTIVE:
            return dist.all_reduce(own, dist.ReduceOp.MAX, **options).wait
        # Rank 0 answers when it has the numbers of all, so they are in the same place as the answer.
        collect = partial(dist.gather, own, group_dst=0, **options)
        tell = partial(dist.broadcast, own, group_src=0, **options)
        if self.rank > 0:
            works = collect(), tell()
            return lambda: [work.wait() for work in works]
        collected = collect(gather_list=rows)

        def answer() -> None:
            collected.wait()
            everyones.numpy().max(0, out=own.numpy())
            tell().wait()

        return answer

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

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """A context in which the ranks wait so long for each other, through the same group."""
        if self._group is None:
            yield
            return
        self._wait_for_pending()
        before, self._patience = self._patience, timedelta(seconds=seconds)
        try:
            yield
        finally:
            self._patience = before

    def _exchange(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self._wait_for_pending()
        self._call(partial(collective, *arguments, group=self._group, **options))

    def _call(self, exchange: Callable[..., T], *arguments: Any) -> T:
        """Call what exchanges something; raises ``RankLost`` where another rank does not answer."""
        assert self._group is not None
        _wait_as_long(self._group, self._patience)
        try:
            return exchange(*arguments)
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            _shared.clear()  # gloo has closed its connections
            raise _lost(error, self._patience) from error

    def in_a_thread(self, seconds: float) -> SomeRanks:
        """The ranks of the run as a thread of each knows them, in a group of their own.

        Args:
            seconds: how long they wait for each other.
        """
        patience = timedelta(seconds=seconds)
        return SomeRanks([*range(self.size)], self.rank, _own_group(patience), patience)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group in which they agree; None where there is only this rank, or once it has been left."""
        if self._group is not None:
            _wait_as_long(self._group, self._patience)
        return self._group

    def close(self) -> None:
        """Leave the group, at the end of the run and before the default group is destroyed; on all ranks.

        Nobody else may use it any more. Its threads end here, unless something else still refers to it; see
        ``_settle_at_exit``.
        """
        for part in self._parts:
            part.close()
        if self._group is not None:
            group, self._group = self._group, None
            _shared.clear()  # all of them, so that all ranks make the same ones the next time
            if group in private.groups_here():  # others that shared it may have left
                dist.destroy_process_group(group)


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


@cache
def _settle_at_exit() -> None:
    """Leave threads of gloo the interpreter's lock for a moment, at the end of the program.

    Such a thread takes the lock to drop the tensors of its last collective, and aborts the process if the
    interpreter has ended by then. There may be some even where all groups are destroyed: a device mesh refers
    to them. And loops and trainers that others write may end right after an agreement.
    """
    atexit.register(time.sleep, _SETTLING)


def _shared_group(patience: timedelta, members: list[int] | None = None) -> dist.ProcessGroup:
    """The group that ``_own_group`` makes, made once."""
    assert dist.group.WORLD is not None
    kept, key = _shared.setdefault(dist.group.WORLD, {}), tuple(members or ())
    if key not in kept:
        kept[key] = _own_group(patience, members)
    return kept[key]


def _wait_as_long(group: dist.ProcessGroup, patience: timedelta) -> None:
    if _timeouts.get(group) != patience:
        private.set_timeout(group, patience)
        _timeouts[group] = patience


def _own_group(patience: timedelta, members: list[int] | None = None) -> dist.ProcessGroup:
    """A gloo group of ours, whose ranks are connected where our exchanges need it; see Note [Connections].

    Every rank of the run calls this; what it gives to one that is not a member is of no use.

    Raises:
        RankLost: another member has not come within ``patience``, or has ended.
    """
    network.let_gloo_use_the_interface_of_nccl()
    network.allow_many_connections()
    # With this, torch adds a group to each of ours, whose timeout stays as it was when it was made.
    wrapped = dist.get_debug_level() == dist.DebugLevel.DETAIL
    with network.connected_when_used() as when_used:
        group = dist.new_group(
            members,
            backend="gloo",
            timeout=patience / _CONNECTS if when_used and not wrapped else patience,
            group_desc=launcher.OWN_GROUP,
        )
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        _settle_at_exit()
        _wait_as_long(group, patience)
        try:
            _meet(group, patience)
            _connect(group)
        except RuntimeError as error:
            if not (is_lost_peer(error) or isinstance(error, dist.DistError)):
                raise
            raise _lost(error, patience) from error
    return group


def _meet(group: dist.ProcessGroup, patience: timedelta) -> None:
    """Wait until all ranks of a new group have made it."""
    store = group.get_group_store()
    if store.add("here", 1) == group.size():
        store.set("all are here", "")
    store.wait(["all are here"], patience)


def _connect(group: dist.ProcessGroup) -> None:
    """Make the connections that exchanges need: of a ring, of a tree, and of each rank with the first."""
    first = group.rank() == 0
    number, numbers = (
        torch.zeros(size, dtype=torch.int64, device="cpu") for size in (1, group.size())
    )
    everyones = [*numbers.view(-1, 1)]
    dist.all_gather(everyones, number, group)
    dist.gather(number, everyones if first else None, group=group, group_dst=0)
    dist.broadcast(number, group=group, group_src=0)


def _lost(error: Exception, patience: timedelta) -> RankLost:
    """What is said where a group fails because of another rank."""
    late = isinstance(error, dist.DistStoreError) or any(text in str(error) for text in _TOO_LATE)
    if not late:
        return RankLost(
            "another rank has ended, or this one came later than its timeout; it says which."
        )
    return RankLost(
        f"timeout: another rank has not answered for {patience.total_seconds():g} s. If it is only late, "
        "because it saves, evaluates or compiles alone, pass a larger timeout; if not, it hangs, or its "
        "machine is gone."
    )


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
