"""The time of an operation on a device: what it computes or what it moves, whichever takes longer."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from torchtune_adaptive.planner.speed import collectives, devices, kernels
from torchtune_adaptive.planner.speed.devices import Speeds
from torchtune_adaptive.planner.speed.operations import (
    ATTENTION,
    COLLECTIVE,
    COPY,
    GEMM,
    MEMORY,
    Operation,
)

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


def seconds(operation: Operation, speeds: Speeds, ranks: int, compiled: bool) -> float:
    """The time of an operation that is no synchronization. In a compiled step, one that joins another one's
    kernel only adds what it moves."""
    if operation.kind == COLLECTIVE:
        return _of_collective(operation, speeds, ranks)
    if operation.kind == COPY:
        return devices.COPY_LATENCY + operation.nbytes / speeds.host
    if operation.kind == MEMORY and not (compiled or speeds.is_host):
        return max(kernels.seconds(operation, speeds), speeds.kernel)
    nbytes = operation.fused_bytes if compiled else operation.nbytes
    time = nbytes / kernels.bandwidth_for(nbytes, speeds)
    if operation.flops and (peak := speeds.peak(operation.dtype)):
        time = max(time, operation.flops / (peak * _share(operation, speeds)))
    if compiled and operation.joins:
        return time
    return max(time, speeds.kernel)


def _of_collective(operation: Operation, speeds: Speeds, ranks: int) -> float:
    """The time of a collective among ``ranks``, or those of its own group."""
    size, distance = map(int, operation.shape or (ranks, 1))
    return collectives.seconds(operation.name, operation.nbytes, size, distance, speeds)


def _share(operation: Operation, speeds: Speeds) -> float:
    """The share of the peak that an operation reaches."""
    if operation.kind == ATTENTION:
        forward, backward = speeds.attention
        share = backward if "backward" in operation.name else forward
        return share if speeds.is_host else share * _attention_efficiency(operation.shape)
    if operation.kind == GEMM and operation.shape and speeds.processors > 1:
        computes = speeds.gemm * (speeds.peak(operation.dtype) or 0.0)
        halves = 2 if operation.dtype == "float32" else 1
        balance = halves * computes / (speeds.bandwidth * devices.STREAMING)
        return speeds.gemm * _shape_efficiency(operation.shape, speeds.processors, balance)
    return speeds.gemm


def _attention_efficiency(shape: tuple[float, ...]) -> float:
    """The share of what attention reaches over long rows with a head dimension of 128."""
    if not shape:
        return 1.0
    keys, dim = shape[2:]
    by_dim = dim / (dim + devices.SOFTMAX) * (1 + devices.SOFTMAX / 128)
    return keys / (keys + devices.BEGINNING) * min(1.0, by_dim)


@lru_cache(maxsize=1 << 14)
def _shape_efficiency(shape: tuple[float, ...], processors: int, balance: float) -> float:
    """The share of what large matrix products reach, with the best tile. Three things are lost: tiles that
    stick out of the matrix, processors that have no tile in the last wave, and the time in which a tile is
    written and nothing is computed. Writing m x n numbers takes as long as ``balance`` steps along k: for 2
    bytes each, that is how many FLOPs the device does for each byte that it moves."""
    batch, m, n, k = shape
    best = 0.0
    for (height, width), speed in _TILES:
        rows, columns = ceil(m / height), ceil(n / width)
        inside = (m / (rows * height)) * (n / (columns * width))
        tiles = batch * rows * columns
        busy = tiles / (ceil(tiles / processors) * processors)
        best = max(best, inside * busy * speed)
    return best * k / (k + balance)
