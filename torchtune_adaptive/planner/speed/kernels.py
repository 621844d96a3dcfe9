"""The memory-bound kernels of eager torch: how often they move a tensor, and how fast they can.

The numbers follow from the structure of torch's kernels, and from microbenchmarks of memory; none from the
speed of a training run. What is compiled is fused into other kernels, and does not come here.
"""

from __future__ import annotations

from typing import NamedTuple

from torchtune_adaptive.planner.speed.devices import STREAMING, Speeds
from torchtune_adaptive.planner.speed.operations import Operation

LATENCY = 0.6e-6
"""Seconds from a read to its data while the memory is busy; idle, microbenchmarks give 0.3 to 0.5 us on A100
and H100. What a multiprocessor has under way, divided by this, is the most that it can read."""
CACHED = 0.4
"""What it takes to read from the L2 cache, as a share of what memory takes: 2.5 times the bandwidth in
microbenchmarks of A100 and H100."""
LEFT_IN_CACHE = 2 / 3
"""Share of the L2 cache up to which what an operation moves is there, because the one before it has just
written it (assumption)."""
ISSUED = 0.8
"""Share of the arithmetic units that such kernels keep busy (assumption)."""
READ_ONCE = 1024
"""Columns up to which a softmax keeps its row in registers, and reads it once."""


class Kernel(NamedTuple):
    """The structure of a kernel."""

    passes: float = 1.0
    """Bytes moved for each byte that is read or written at least once."""
    under_way: float = 0.0
    """Bytes that a multiprocessor has asked for at a time; 0 if they are enough for any memory."""
    instructions: float = 0.0
    """Instructions for each element, in fp32."""
    tensors: int = 0
    """Tensors that are read or written, so that bytes tell the number of elements."""
    reads_again: tuple[int, int] = (0, 0)
    """Tensors that are read once more, from the cache if they fit there, of how many that are moved."""


STREAMED = Kernel()
# 2,048 threads with 8 bytes each for every tensor that is read, two thirds of their time; the rest is their
# start, the arithmetic, and writing.
_ONE_INPUT = Kernel(under_way=2048 * 8 * 2 / 3)
# A block for each row reads it twice, and waits in between until its threads have added up.
_NORM = Kernel(under_way=2048 * 8 / 2)
# Two kernels, for the gradients of the input and of the weights: both read the gradient and the input.
_NORM_BACKWARD = Kernel(passes=5 / 3)
# Four values of 2 bytes for each of 1,024 threads; results of a block are added up after that.
_COLUMN_SUM = Kernel(under_way=1024 * 8)
_KERNELS = {
    "native_layer_norm": _NORM,
    "_fused_rms_norm": _NORM,
    "native_layer_norm_backward": _NORM_BACKWARD,
    "_fused_rms_norm_backward": _NORM_BACKWARD,
    # erf: its polynomial, exp, the conversions; backward the density, too.
    "gelu": _ONE_INPUT._replace(instructions=30, tensors=2),
    "gelu_backward": Kernel(instructions=45, tensors=3),
    # Reads for the maximum, for the sum, and to write.
    "_log_softmax": Kernel(reads_again=(2, 2)),
    "_softmax": Kernel(reads_again=(2, 2)),
    "_log_softmax_backward_data": Kernel(reads_again=(2, 3)),
    "_softmax_backward_data": Kernel(reads_again=(2, 3)),
}
_ITEM_SIZES = {"float32": 4, "float64": 8, "int64": 8}


def seconds(operation: Operation, speeds: Speeds) -> float:
    """The time of a memory-bound operation, without its start."""
    kernel = _KERNELS.get(operation.name, STREAMED)
    if operation.name == "sum" and operation.shape:
        kernel = _COLUMN_SUM
    bandwidth = bandwidth_for(operation.nbytes, speeds)
    if kernel.under_way:
        bandwidth = min(bandwidth, speeds.processors * kernel.under_way / LATENCY)
    size = _ITEM_SIZES.get(operation.dtype, 2)
    passes = kernel.passes + _reading_again(kernel, operation, speeds, size)
    time = operation.nbytes * passes / bandwidth
    if kernel.instructions:
        elements = operation.nbytes / (size * kernel.tensors)
        per_second = speeds.single / 2 * ISSUED  # peaks count a multiplication and an addition
        time = max(time, elements * kernel.instructions / per_second)
    return time


def bandwidth_for(nbytes: float, speeds: Speeds) -> float:
    """Bytes/s at which an operation moves so many: those of the memory, or of its cache."""
    in_cache = nbytes <= LEFT_IN_CACHE * speeds.cache
    return speeds.bandwidth * STREAMING / (CACHED if in_cache else 1.0)


def _reading_again(kernel: Kernel, operation: Operation, speeds: Speeds, size: int) -> float:
    again, moved = kernel.reads_again
    if not again or not operation.shape or operation.shape[1] <= READ_ONCE:
        return 0.0
    # Two blocks on each multiprocessor, with a row each.
    at_a_time = 2 * speeds.processors * operation.shape[1] * size
    return again / moved * (CACHED if at_a_time <= speeds.cache else 1.0)
