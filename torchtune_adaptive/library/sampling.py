"""The rows of each step: a dataset's, dealt out to the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtune_adaptive.common import UsageError, arguments
from torchtune_adaptive.core import SampleOrder


class IndexedRows(Protocol):
    """A dataset by index, such as a list or a map-style ``torch.utils.data.Dataset``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def steps_of(
    data: IndexedRows,
    rows: int,
    *,
    epoch: int = 0,
    shuffle: bool = True,
    seed: int = 0,
    start: int = 0,
    mesh: DeviceMesh | None = None,
) -> Iterator[list[Any]]:
    """This rank's rows of each step of an epoch; every rank gets the same number.

    The order is that of ``torch.utils.data.DistributedSampler``. Rows that do not fill a step are left out.

    Args:
        data: the dataset.
        rows: the rows of a step on each rank: one micro-batch, or a multiple of it to accumulate gradients.
        epoch: the number of the epoch, which decides the order of the rows.
        shuffle: whether the order is another one in each epoch, or always the dataset's.
        seed: the seed of the shuffling.
        start: rows that each rank has used already, to continue in the middle of an epoch.
        mesh: the mesh over whose ranks the rows are dealt out, such as that of ``fully_shard``; by default,
            all ranks. With tensor parallelism, the ranks that share a layer get the same rows.
    """
    rows, epoch = arguments.whole("rows", rows), arguments.whole("epoch", epoch, at_least=0)
    start = arguments.whole("start", start, at_least=0)
    rank, ranks = 0, 1
    if mesh is not None:
        rank, ranks = mesh.mesh.flatten().tolist().index(dist.get_rank()), mesh.size()
    elif dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
    order = SampleOrder(len(data), ranks, shuffle, seed)
    if rows > order.rows_per_rank:
        raise UsageError(
            f"rows: {rows} in a step on each rank, and the data has {order.rows_per_rank}. Lower it (the "
            "ceiling of find_batch_size bounds what is found), or use more data."
        )
    mine = order.share(epoch, rank, ranks)
    starts = range(start, len(mine) - rows + 1, rows)
    return ([data[index] for index in mine[first : first + rows].tolist()] for first in starts)
