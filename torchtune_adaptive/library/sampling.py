"""The rows of each step: a dataset's, dealt out to the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtune_adaptive.common import UsageError, arguments, counted
from torchtune_adaptive.core import SampleOrder


class IndexedRows(Protocol):
    """A dataset by index, such as a list or a map-style ``torch.utils.data.Dataset``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def steps_of(
    data: IndexedRows,
    rows: int | None = None,
    *,
    global_rows: int | None = None,
    epoch: int = 0,
    shuffle: bool = True,
    seed: int = 0,
    start: int = 0,
    mesh: DeviceMesh | None = None,
) -> Steps:
    """This rank's rows of each step of an epoch.

    The order is that of ``torch.utils.data.DistributedSampler``. Rows that do not fill a step are left out.
    With ``global_rows`` it does not depend on the number of ranks: each step has the same rows on any, some
    ranks one more than others where they do not divide.

    Args:
        data: the dataset.
        rows: the rows of a step on each rank: one micro-batch, or a multiple of it to accumulate gradients.
        global_rows: in place of ``rows``, the rows of a step on all ranks together, at least one on each.
        epoch: the number of the epoch, which decides the order of the rows.
        shuffle: whether the order is another one in each epoch, or always the dataset's.
        seed: the seed of the shuffling.
        start: rows that each rank has used already, to continue in the middle of an epoch; with
            ``global_rows``, those that all ranks have used together.
        mesh: the mesh over whose ranks the rows are dealt out, such as that of ``fully_shard``; by default,
            all ranks. With tensor parallelism, the ranks that share a layer get the same rows.
    """
    epoch = arguments.whole("epoch", epoch, at_least=0)
    start = arguments.whole("start", start, at_least=0)
    rank, ranks = 0, 1
    if mesh is not None:
        rank, ranks = mesh.mesh.flatten().tolist().index(dist.get_rank()), mesh.size()
    elif dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
    if (rows is None) is (global_rows is None):
        raise UsageError("rows: pass either rows or global_rows.")
    if rows is not None:
        of_step = arguments.whole("rows", rows) * ranks
        order = SampleOrder(len(data), ranks, shuffle, seed)
        start *= ranks
        if rows > order.rows_per_rank:
            raise UsageError(
                f"rows: {rows} in a step on each rank, and the data has {order.rows_per_rank}. Lower it (the "
                "ceiling of find_batch_size bounds what is found), or use more data."
            )
    else:
        of_step = arguments.whole("global_rows", global_rows)
        order = SampleOrder(len(data), 1, shuffle, seed)
        if of_step > len(data):
            raise UsageError(
                f"global_rows: {of_step} in a step, and the data has {len(data)}. Lower it, or use more data."
            )
        if of_step < ranks:
            raise UsageError(
                f"global_rows: {of_step} in a step, so that some of {ranks} ranks would have none. Raise it, "
                "or use fewer ranks."
            )
    return Steps(data, order, of_step, rank, ranks, epoch, start)


class DealtRows(list[Any]):
    """This rank's rows of a step, with their numbers among those of all ranks."""

    def __init__(self, rows: Iterable[Any], numbers: range) -> None:
        super().__init__(rows)
        self.numbers = numbers


class Steps(Iterator[list[Any]]):
    """This rank's rows of each step of an epoch; made by ``steps_of``."""

    def __init__(
        self,
        data: IndexedRows,
        order: SampleOrder,
        of_step: int,
        rank: int,
        ranks: int,
        epoch: int,
        used: int,
    ) -> None:
        self._data, self._order, self._of_step = data, order, of_step
        self._rank, self._ranks = rank, ranks
        self.epoch = epoch
        """The number of the epoch."""
        self.used = used
        """The rows of the epoch that all ranks have used, with those of the step that was given last."""
        self._mine: Any = None
        """The rows of this rank from the step on that it has been given first, which begin at a place."""
        self._place = 0

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> DealtRows:
        if self.used + self._of_step > self._order.per_epoch:
            raise StopIteration
        if self._mine is None:
            # A place is always the same rank's, wherever it begins, as long as there are as many ranks.
            turn = (self._rank - self.used) % self._ranks
            self._mine = self._order.share(self.epoch, turn, self._ranks, self.used)
            self._place = self.used + turn
        first, used = self._number_of_mine(self.used), self.used
        self.used += self._of_step
        mine = self._mine[first : self._number_of_mine(self.used)]
        numbers = range(self._place + first * self._ranks - used, self._of_step, self._ranks)
        return DealtRows((self._data[index] for index in mine.tolist()), numbers)

    def _number_of_mine(self, used: int) -> int:
        """The rows of this rank among those up to ``used``."""
        return -(-(used - self._place) // self._ranks)

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, for a checkpoint; the same on every rank."""
        order = self._order
        return {
            "epoch": self.epoch,
            "used": self.used,
            "global_rows": self._of_step,
            "samples": order.samples,
            "shuffle": order.shuffle,
            "seed": order.seed,
            "ranks": order.ranks,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was called, on any number of ranks, with the same steps."""
        if missing := {*self.state_dict()} - {*state}:
            raise UsageError(
                f"load_state_dict: {', '.join(sorted(missing))} is missing. Pass what state_dict returned."
            )
        if self._of_step != state["global_rows"]:
            raise UsageError(
                f"global_rows: {self._of_step} in a step on {counted(self._ranks, 'rank')}, and the state is "
                f"of steps of {state['global_rows']}. Call steps_of with "
                f"global_rows={state['global_rows']}; for steps of another size, with "
                f"epoch={state['epoch']} and start={state['used']} instead."
            )
        own = self.state_dict()
        for name, what in (("samples", "data"), ("shuffle", "shuffle"), ("seed", "seed")):
            if own[name] != state[name]:
                raise UsageError(
                    f"{what}: {name} is {own[name]!r}, and {state[name]!r} in the state, so rows would have "
                    "another order. Use the same."
                )
        self._order = replace(self._order, ranks=state["ranks"])
        self.epoch, self.used, self._mine = state["epoch"], state["used"], None
