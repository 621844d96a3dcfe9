"""A stand-in for an accelerator: its allocator, its streams' lateness, its statistics and its error texts.

Tensors are real and on the CPU. What an operation creates also takes a block of a model of torch's caching
allocator, so that what is asked of ``torch.accelerator`` has the answers that a card would give: memory is
cached, capped, given back and retried for. A freed block comes back late, as that of a stream that is behind.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from torchtune_adaptive.core.device.accelerator import AcceleratorMemory
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.planner import fake_device
from torchtune_adaptive.planner.memory.allocator import LimitedAllocator, MemoryBlock, OutOfMemory

SCALE = 4096  # a tiny model's tensors, as large as blocks that an allocator notices


def cuda_error(detail: str) -> Exception:
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {detail}.")


class Card(SimulatedMemory):
    """An accelerator with a neighbour on it.

    Args:
        total: bytes of the card.
        neighbour: bytes that another process has.
        lateness: operations for which a freed block stays in use.
        fraction: what the user has set as this process's share.
        scale: bytes of the card for each byte of a tensor.
        error: makes what is raised when memory runs out.
    """

    def __init__(
        self,
        total: int,
        *,
        neighbour: int = 0,
        lateness: int = 5,
        fraction: float = 1.0,
        scale: int = SCALE,
        error: Callable[[str], Exception] = cuda_error,
    ) -> None:
        super().__init__(limit=total)
        self.total, self.neighbour, self.fraction = total, neighbour, fraction
        self.error = error
        self.fractions: list[float] = []  # each that was set
        self.pinned = 0  # bytes of the cache of pinned host memory
        self.readings = 0  # of the allocator's statistics
        self.waits_with_lock = 0  # emptied the cache of a device that was still busy
        self._lateness, self._scale = lateness, scale
        self._allocator = LimitedAllocator(total)
        self._blocks: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, MemoryBlock]] = {}
        self._late: deque[tuple[int, MemoryBlock]] = deque()
        self._operations = 0
        self._retries = 0  # before the statistics were reset

    # --- what operations do -------------------------------------------------------------------------

    def count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        if key in self._blocks:
            if self._blocks[key][1] == nbytes:
                return
            self._forget(key)
        if nbytes == 0:
            return
        block = self._allocate(nbytes * self._scale)
        reference = weakref.ref(storage, lambda _: self._forget(key))
        self._blocks[key] = (reference, nbytes, block)

    def check(self, extra: int = 0) -> None:
        self._operations += 1
        while self._late and self._late[0][0] <= self._operations:
            self._allocator.free(self._late.popleft()[1])

    def _forget(self, key: int) -> None:
        self._late.append((self._operations + self._lateness, self._blocks.pop(key)[2]))

    def _allocate(self, nbytes: int) -> MemoryBlock:
        self._allocator.capacity = min(int(self.fraction * self.total), self.total - self.neighbour)
        try:
            return self._allocator.allocate(nbytes)
        except OutOfMemory:  # now for the blocks that streams still use, as torch's allocator does
            self.synchronize()
        try:
            return self._allocator.allocate(nbytes)
        except OutOfMemory as error:
            raise self.error(str(error)) from None

    # --- what ``torch.accelerator`` and the device's module answer ----------------------------------

    def synchronize(self, device: Any = None) -> None:
        while self._late:
            self._allocator.free(self._late.popleft()[1])

    def empty_cache(self) -> None:
        self.waits_with_lock += bool(self._late)
        self.synchronize()
        self._allocator.release()

    def empty_host_cache(self) -> None:
        self.pinned = 0

    def get_memory_info(self, device: Any = None) -> tuple[int, int]:
        return self.total - self.neighbour - self._allocator.reserved, self.total

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        self.readings += 1
        peaks = {
            "reserved_bytes": self._allocator.peak_reserved,
            "allocated_bytes": self._allocator.peak_allocated,
            "active_bytes": self._allocator.peak_allocated,
        }
        nested: dict[str, Any] = {kind: {"all": {"peak": peak}} for kind, peak in peaks.items()}
        return {**nested, "num_alloc_retries": self._retries + self._allocator.retries}

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        nested = Card.memory_stats_as_nested_dict(self)
        retries = nested.pop("num_alloc_retries")
        flat = {f"{kind}.all.peak": of["all"]["peak"] for kind, of in nested.items()}
        return {**flat, "num_alloc_retries": retries}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._retries += self._allocator.retries
        self._allocator.watch()

    def memory_reserved(self, device: Any = None) -> int:
        self.readings += 1
        return self._allocator.reserved

    def memory_allocated(self, device: Any = None) -> int:
        self.readings += 1
        return self._allocator.allocated

    def is_available(self) -> bool:
        return False  # a torch that is built for CUDA asks, and would use the card's own functions

    def get_device_name(self, device: Any = None) -> str:
        return "Fake 1000"

    def current_device_index(self) -> int:
        return 0

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        assert device.index is not None
        return self.fraction

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        assert device.index is not None and 0 <= fraction <= 1
        self.fractions.append(fraction)
        self.fraction = fraction

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Answer for ``torch.accelerator`` from now on, and take part in activation offloading."""
        for name in (
            "current_device_index",
            "empty_cache",
            "empty_host_cache",
            "get_memory_info",
            "memory_allocated",
            "memory_reserved",
            "memory_stats",
            "reset_peak_memory_stats",
            "synchronize",
        ):
            patch.setattr(torch.accelerator, name, getattr(self, name), raising=False)
        if find_spec("torchtune"):
            from torchtune_adaptive.recipe import private

            patch.setattr(private.offloading_module(), "torch", _TorchOfCard())
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(torch, "get_device_module", lambda device: self)

    def memory(self, limit: int | None = None) -> AcceleratorMemory:
        """What the product makes of this card, which must have been installed."""
        return CardMemory(self, limit)


class _OnHost:
    """A copy that takes none of the card's memory."""

    def copy_(self, tensor: torch.Tensor, non_blocking: bool) -> None:
        with _disable_current_modes():
            self._kept = tensor.detach().clone()

    def to(self, device: str, non_blocking: bool) -> torch.Tensor:
        assert device == "cuda"
        return self._kept.clone()


class _TorchOfCard:
    """``torch`` for torchtune's activation offloading, which uses ``torch.cuda`` by name."""

    cuda = SimpleNamespace(
        default_stream=fake_device.default_stream,
        Stream=fake_device.FakeStream,
        stream=fake_device.in_stream,
    )

    @staticmethod
    def empty_like(tensor: torch.Tensor, *, device: str, pin_memory: bool) -> Any:
        assert device == "cpu" and pin_memory
        return _OnHost()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class CardMemory(AcceleratorMemory):
    """Lets the card see the operations. Nothing else differs from the product's."""

    def __init__(self, card: Card, limit: int | None = None) -> None:
        super().__init__(torch.device("cuda"), limit)
        self._card = card

    def running(self) -> AbstractContextManager[object]:
        return self._card.running()

    def adopt(self, tensors: Any) -> None:
        self._card.adopt(tensors)


NVML = "NVML_SUCCESS == r INTERNAL ASSERT FAILED at"


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.OutOfMemoryError(""),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("CUDA driver error: out of memory"),  # expandable segments
    RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"),  # vLLM
    RuntimeError(f'{NVML} "../c10/cuda/CUDACachingAllocator.cpp":1131, please report a bug'),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("Triton Error [HIP]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("HIP error: out of memory"),
    RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    RuntimeError("CUDA error: HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasCreate(handle)`"),
    RuntimeError("hipDNN error: HIPDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("MIOpen error: miopenStatusAllocFailed"),
    RuntimeError("HIP failure: 'out of memory'"),
    RuntimeError("XPU out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"
    ),
    RuntimeError(
        "DefaultCPUAllocator: not enough memory: you tried to allocate 1099511627776 bytes."
    ),
]


SOMETHING_ELSE = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 16x2)"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError(
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSetStream(handle)`"
    ),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_BAD_LAUNCH_PARAM"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    RuntimeError("out of resource: shared memory, Required: 264192, Hardware limit: 232448"),
    RuntimeError("[enforce fail] Connection closed by peer"),
    RuntimeError(f'{NVML} "../c10/cuda/driver_api.cpp":42, please report a bug'),
    RuntimeError('INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":99'),
    # A communicator that failed is dead, whatever the cause.
    RuntimeError("NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'"),
    RuntimeError("RCCL error in: ProcessGroupNCCL.cpp:99. HIP failure: 'out of memory'"),
    dist.DistBackendError("Cuda failure 2 'out of memory'"),
    dist.DistBackendError("CUDA error: out of memory"),
    dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:99, HIP failure: 'out of memory'"),
    ValueError("CUDA out of memory"),
    IndexError("index out of range in self"),
    MemoryError(),
    KeyboardInterrupt(),
]
