"""How ranks hold a tensor: the one place where placements are read."""

from __future__ import annotations

from enum import Enum
from functools import cache

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate


class Holding(Enum):
    """How the ranks along one dimension of a mesh hold a tensor."""

    SPLIT = "split"
    """Each holds a part of it."""
    COPIED = "copied"
    """Each holds all of it."""
    SUMMED = "summed"
    """Each holds a term; the tensor is the sum."""


SHARDED = (Holding.SPLIT,)
"""As by ``fully_shard`` on a mesh of one dimension."""
HYBRID = (Holding.COPIED, Holding.SPLIT)
"""As by ``fully_shard`` on a mesh of two (HSDP): the replicas, and the shards of each."""


def held(tensor: torch.Tensor) -> tuple[Holding, ...]:
    """How the ranks hold a tensor, along each dimension of its mesh; a plain tensor has no mesh."""
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(map(_held, map(type, tensor.placements)))


@cache  # asked for each gradient of each step
def _held(kind: type[Placement]) -> Holding:
    if issubclass(kind, Replicate):
        return Holding.COPIED
    if issubclass(kind, Partial):
        return Holding.SUMMED
    # Not only ``Shard``: what FSDP splits where tensor parallelism has split before has another placement,
    # of a class that is private, and a subclass of ``Shard`` on some versions of torch only.
    return Holding.SPLIT


def parts(tensor: torch.Tensor) -> int:
    """The number of parts into which a tensor is split, over all dimensions of its mesh."""
    number = 1
    for dim, way in enumerate(held(tensor)):
        if way is Holding.SPLIT:
            number *= tensor.device_mesh.size(dim)  # type: ignore[attr-defined]
    return number
