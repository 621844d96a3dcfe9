"""The questions that every device answers about its memory: how much there is, how much a step takes.

An accelerator answers from its caching allocator (see ``accelerator``). The CPU has none, so it is given a
simulated one (see ``simulated``).
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from torchtune_adaptive.core.private import is_traceable_wrapper_subclass

# Out of memory, said by something other than ``torch.OutOfMemoryError``. Triton's "out of resource" is
# not among them: it is about a kernel's shared memory, and no batch size cures it.
_OUT_OF_MEMORY_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",  # expandable segments
    "CUDA Error: out of memory",  # vLLM, when it wakes up
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    # On a full device. Or on one that a kernel has left broken: then the next call says so, and is a bug.
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",  # from cuDNN 9 on
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "HIP out of memory",
    "HIP error: out of memory",
    "Triton Error [HIP]: out of memory",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasCreate",
    "HIPDNN_STATUS_ALLOC_FAILED",
    "HIPDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "HIPDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "miopenStatusAllocFailed",
    "HIP failure: 'out of memory'",  # RCCL
    "XPU out of memory",
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",  # XPU's driver
    "NPU out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)

# Where NVML does not know the device (MIG, vGPU, Jetson, some containers), the allocator fails while it
# writes its report of being out of memory. From anywhere else, the same assertion is something else.
_FAILED_REPORT_TEXTS = ("NVML_SUCCESS == r INTERNAL ASSERT FAILED", "CUDACachingAllocator")

# A communicator that failed, be it for want of memory, is likely dead, and the run with it.
_DEAD_COMMUNICATOR_TEXTS = ("NCCL error", "NCCL Error", "RCCL error", "RCCL Error")


def is_out_of_memory(exception: BaseException) -> bool:
    """Whether the device ran out of memory, and a smaller step may succeed.

    Anything else is a bug or the end of the run, and must not be swallowed.
    """
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    if not isinstance(exception, RuntimeError) or isinstance(exception, dist.DistBackendError):
        return False
    text = str(exception)
    if any(t in text for t in _DEAD_COMMUNICATOR_TEXTS):
        return False
    return any(t in text for t in _OUT_OF_MEMORY_TEXTS) or all(
        t in text for t in _FAILED_REPORT_TEXTS
    )


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor is made of: its shard, its quantized data, or itself."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # a sharded tensor also names its mesh
                yield from plain_tensors(part)
    else:
        yield tensor


@dataclass(frozen=True)
class Usage:
    """Use of memory in some time, such as since ``DeviceMemory.watch``."""

    peak_bytes: int
    """The most that was held at once, in the unit that runs out: reserved memory on an accelerator."""
    peak_allocated_bytes: int
    """The most that tensors held at once."""
    retries: int
    """The number of times that the allocator had to give memory back before it could go on."""
    peak_active_bytes: int = 0
    """The most that tensors held or streams still used, where the allocator tells them apart."""

    def __or__(self, other: Usage) -> Usage:
        """The use in two times together."""
        return Usage(
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
            peak_allocated_bytes=max(self.peak_allocated_bytes, other.peak_allocated_bytes),
            retries=self.retries + other.retries,
            peak_active_bytes=max(self.peak_active_bytes, other.peak_active_bytes),
        )


_NOTHING = Usage(0, 0, 0)
_NO_CONTEXT = nullcontext()


class DeviceMemory(ABC):
    """One device's memory, as this process sees it."""

    is_out_of_memory = staticmethod(is_out_of_memory)
    plain_tensors = staticmethod(plain_tensors)

    name: str
    peaks_of_steps = False
    """Whether the peaks of each step are measured anew; they are the process's, so only its owner sets it."""
    last_step = _NOTHING
    """The use of memory in the step that ended last, or an attempt of it, where peaks are those of steps."""
    _earlier = _NOTHING  # since ``watch`` and until peaks were measured anew
    _retries = 0  # of the process, at the last end of a step

    @abstractmethod
    def capacity(self) -> int:
        """Bytes that this process can get, including what it has; what others hold is not in it."""

    @abstractmethod
    def capped(self, limit: int) -> AbstractContextManager[None]:
        """A context in which the device has no more than ``limit`` bytes for this process."""

    @abstractmethod
    def statistics(self) -> Usage:
        """The peaks since ``restart_peaks``, and the retries since the process began; in one reading."""

    @abstractmethod
    def restart_peaks(self) -> None:
        """Measure peaks anew from now on."""

    def watch(self) -> None:
        """Start a new period of measurement."""
        self.restart_peaks()
        self._earlier = replace(_NOTHING, retries=-self.statistics().retries)

    def usage(self) -> Usage:
        """The use of memory since ``watch``."""
        return self._earlier | self.statistics()

    def end_step(self) -> int:
        """Look at the use of memory, once in each step: an allocator's statistics take long to read.

        Gives the number of times, since the last call, that the allocator had to give memory back.
        """
        now = self.statistics()
        before, self._retries = self._retries, now.retries
        if self.peaks_of_steps:
            self.last_step = replace(now, retries=now.retries - before)
            self._earlier |= replace(now, retries=0)
            self.restart_peaks()
        return now.retries - before

    @property
    def measured(self) -> bool:
        """Whether there is anything to be seen in ``usage``."""
        return True

    @abstractmethod
    def in_use(self) -> int:
        """Bytes held by tensors now."""

    def running(self) -> AbstractContextManager[object]:
        """The context of everything that runs on the device; a simulated device needs it to see anything."""
        return _NO_CONTEXT

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:  # noqa: B027 - a device knows its own
        """Count tensors that exist already as memory in use."""

    def synchronize(self) -> None:  # noqa: B027 - a CPU has nothing to wait for
        """Wait until the device has done everything that was asked of it."""

    def clock(self) -> float:
        """Seconds, at the moment when the device has done everything that was asked of it."""
        self.synchronize()
        return time.perf_counter()

    def release(self) -> None:
        """Give back everything that nothing refers to anymore."""
        gc.collect()

    def record_history(self, enabled: bool) -> None:  # noqa: B027 - only an allocator has a history
        """Start or stop the recording that a memory snapshot shows (torchtune's profiler asks for it)."""
