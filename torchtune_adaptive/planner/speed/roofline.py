"""The time of an operation on a device: what it computes or what it moves, whichever takes longer."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from torchtune_adaptive.planner.speed import devices
from torchtune_adaptive.planner.speed.devices import Speeds
from torchtune_adaptive.planner.speed.operations import ATTENTION, COLLECTIVE, COPY, GEMM, Operation

_TILES = (
    ((128, 256), 1.0),
    ((256, 128), 1.0),
    ((128, 128), 0.92),
    ((64, 128), 0.75),
    ((128, 64), 0.75),
    ((64, 64), 0.60),
    ((128, 32), 0.45),
    ((32, 128), 0.45),
)
"""Tiles of a matrix product, and how fast each is compared with the largest: smaller ones read more for what
they compute."""
_FILLING = 128.0
"""Steps along k that the pipeline of a tile takes to fill and to drain."""


def seconds(operation: Operation, speeds: Speeds, ranks: int, compiled: bool) -> float:
    """The time of an operation that is no synchronization. In a compiled step, one that joins another one's
    kernel only adds what it moves."""
    if operation.kind == COLLECTIVE:
        if ranks == 1:
            return 0.0
        passes = 2 if operation.name.startswith("allreduce") else 1
        wire = operation.nbytes * passes * (ranks - 1) / ranks
        return devices.COLLECTIVE_LATENCY + wire / speeds.collective_bandwidth(ranks)
    if operation.kind == COPY:
        return devices.COPY_LATENCY + operation.nbytes / speeds.host
    nbytes = operation.fused_bytes if compiled else operation.nbytes
    time = nbytes / (speeds.bandwidth * devices.STREAMING)
    if operation.flops and (peak := speeds.peak(operation.dtype)):
        time = max(time, operation.flops / (peak * _share(operation, speeds)))
    if compiled and operation.joins:
        return time
    return max(time, speeds.kernel)


def _share(operation: Operation, speeds: Speeds) -> float:
    """The share of the peak that an operation reaches."""
    if operation.kind == ATTENTION:
        forward, backward = speeds.attention
        return backward if "backward" in operation.name else forward
    if operation.kind == GEMM and operation.shape and speeds.processors > 1:
        return speeds.gemm * _shape_efficiency(operation.shape, speeds.processors)
    return speeds.gemm


@lru_cache(maxsize=1 << 14)
def _shape_efficiency(shape: tuple[float, ...], processors: int) -> float:
    """The share of what large matrix products reach, with the best tile. Two things are lost: tiles that
    stick out of the matrix, and processors that have no tile in the last wave."""
    batch, m, n, k = shape
    best = 0.0
    for (height, width), speed in _TILES:
        rows, columns = ceil(m / height), ceil(n / width)
        inside = (m / (rows * height)) * (n / (columns * width))
        tiles = batch * rows * columns
        busy = tiles / (ceil(tiles / processors) * processors)
        best = max(best, inside * busy * speed)
    return best * k / (k + _FILLING)
