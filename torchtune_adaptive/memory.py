"""The memory of the device that a run trains on: how much there is, how much a step takes.

Two kinds of device answer the same questions. An accelerator answers from its caching allocator. The CPU
has none, so it is given a simulated one: with a limit set, every tensor that a step creates is counted,
and the operation that passes the limit raises ``torch.OutOfMemoryError``, as a device would. It is exact
and repeatable, which is what makes the demo and the tests possible without a GPU.

This is the only file that names an accelerator.
"""

from __future__ import annotations

import functools
import gc
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

# Out of memory, said by something other than ``torch.OutOfMemoryError``. Triton's "out of resource" is
# not among them: it is about a kernel's shared memory, and no batch size cures it.
_OUT_OF_MEMORY_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "HIP out of memory",
    "XPU out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",  # NCCL
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def is_out_of_memory(exception: BaseException) -> bool:
    """Whether the device ran out of memory; anything else is a bug and must not be swallowed."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    text = str(exception)
    return isinstance(exception, RuntimeError) and any(t in text for t in _OUT_OF_MEMORY_TEXTS)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor is made of: its shard, its quantised data, or itself."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # a sharded tensor also names its mesh
                yield from plain_tensors(part)
    else:
        yield tensor


@dataclass(frozen=True)
class Usage:
    """What has been used since ``DeviceMemory.watch``."""

    peak_bytes: int
    """The most that was held at once, in the unit that runs out: reserved memory on an accelerator."""

    peak_allocated_bytes: int
    """The most that tensors held at once."""

    retries: int
    """How often the allocator had to give memory back before it could go on."""


class DeviceMemory(ABC):
    """One device's memory, as this process sees it."""

    name: str

    @abstractmethod
    def capacity(self) -> int:
        """Bytes that this process can get, including what it has: neighbours' memory is not in it."""

    @abstractmethod
    def capped(self, limit: int) -> AbstractContextManager[None]:
        """Within this context the device has no more than ``limit`` bytes for this process."""

    @abstractmethod
    def watch(self) -> None:
        """Start a new period of measurement."""

    @abstractmethod
    def usage(self) -> Usage:
        """What has been used since ``watch``."""

    @abstractmethod
    def retries(self) -> int:
        """How often, since the process began, the allocator had to give memory back to go on."""

    @property
    def measured(self) -> bool:
        """Whether there is anything to be seen in ``usage``."""
        return True

    @abstractmethod
    def in_use(self) -> int:
        """Bytes held by tensors now."""

    def running(self) -> AbstractContextManager[object]:
        """Around everything that runs on the device: what a simulated device needs in order to see it."""
        return nullcontext()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:  # noqa: B027 - a device knows its own
        """Count tensors that exist already as memory in use."""

    def release(self) -> None:
        """Give back everything that nothing refers to any more."""
        gc.collect()

    def record_history(self, enabled: bool) -> None:  # noqa: B027 - only an allocator has a history
        """Start or stop the recording that a memory snapshot shows (torchtune's profiler asks for it)."""


def device_memory(device: torch.device, limit: int | None = None) -> DeviceMemory:
    """The memory of ``device``, capped at ``limit`` bytes if one is given."""
    if device.type == "cpu":
        return SimulatedMemory(limit)
    return AcceleratorMemory(device, limit)


class AcceleratorMemory(DeviceMemory):
    """Memory behind a caching allocator: CUDA, and others as far as ``torch.accelerator`` goes."""

    def __init__(self, device: torch.device, limit: int | None) -> None:
        self._device = device
        self._limit = limit
        self._retries_before = 0
        module = torch.get_device_module(device)
        self.name = (
            module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
        )
        # A real cap, not arithmetic: the allocator itself refuses to pass it, and frees its cache first.
        self._set_fraction = getattr(module, "set_per_process_memory_fraction", None)
        self._total = torch.accelerator.get_memory_info(device)[1]
        self._cap(limit)

    def capacity(self) -> int:
        free, _ = torch.accelerator.get_memory_info(self._device)
        available = free + torch.accelerator.memory_reserved(self._device)
        return min(available, self._limit) if self._limit else available

    @contextmanager
    def capped(self, limit: int) -> Iterator[None]:
        self._cap(limit)
        try:
            yield
        finally:
            self._cap(self._limit)

    def _cap(self, limit: int | None) -> None:
        if self._set_fraction is not None:
            fraction = min(limit / self._total, 1.0) if limit else 1.0
            self._set_fraction(fraction, self._device)

    def watch(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._retries_before = self.retries()

    def usage(self) -> Usage:
        return Usage(
            peak_bytes=torch.accelerator.max_memory_reserved(self._device),
            peak_allocated_bytes=torch.accelerator.max_memory_allocated(self._device),
            retries=self.retries() - self._retries_before,
        )

    def retries(self) -> int:
        return torch.accelerator.memory_stats(self._device).get("num_alloc_retries", 0)

    def in_use(self) -> int:
        return torch.accelerator.memory_allocated(self._device)

    def release(self) -> None:
        super().release()
        torch.accelerator.empty_cache()

    def record_history(self, enabled: bool) -> None:
        if (
            self._device.type == "cuda"
        ):  # private, and the only way; torchtune's recipes use it as well
            torch.cuda.memory._record_memory_history(enabled="all" if enabled else None)


class SimulatedMemory(DeviceMemory):
    """The CPU as a device with a limit: live tensor bytes, counted one by one.

    Nothing is counted until there is a limit, and then only what happens in ``running``: what the host
    does between steps (loading, collating, saving) happens outside a device's memory.
    """

    name = "simulated device"

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._in_use = 0
        self._peak = 0

    def capacity(self) -> int:
        if self.limit is not None:
            return self.limit
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return self._in_use + psutil.virtual_memory().available // neighbours

    @contextmanager
    def capped(self, limit: int) -> Iterator[None]:
        before, self.limit = self.limit, limit
        try:
            yield
        finally:
            self.limit = before

    @contextmanager
    def running(self) -> Iterator[None]:
        if self.limit is None:
            yield
            return
        # Compiled regions run eager: within one, single operations could not be seen.
        with (
            torch.compiler.set_stance("force_eager"),
            _follow_resizing(self),
            _CountNewTensors(self),
        ):
            yield

    def watch(self) -> None:
        self._peak = self._in_use

    def usage(self) -> Usage:
        return Usage(self._peak, self._peak, self.retries())

    def retries(self) -> int:
        return 0  # there is no cache to give back

    @property
    def measured(self) -> bool:
        return self.limit is not None

    def in_use(self) -> int:
        return self._in_use

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                self.count(plain.untyped_storage())

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count ``storage`` at its present size from now on, until nothing refers to it."""
        key, nbytes = id(storage), storage.nbytes()
        if key in self._live:
            reference, counted = self._live[key]
        else:
            reference, counted = weakref.ref(storage, lambda _: self._forget(key)), 0
        self._live[key] = (reference, nbytes)
        self._in_use += nbytes - counted
        self._peak = max(self._peak, self._in_use)

    def check(self, extra: int = 0) -> None:
        """Raise as a device would if more is in use, with ``extra`` bytes on top, than there is."""
        needed = self._in_use + extra
        if self.limit is not None and needed > self.limit:
            raise torch.OutOfMemoryError(
                f"simulated device out of memory: {needed:,} bytes needed at once, "
                f"{self.limit:,} available"
            )

    def _forget(self, key: int) -> None:
        self._in_use -= self._live.pop(key)[1]


class _CountNewTensors(TorchDispatchMode):
    """Counts the storages that operations create, and raises when there are too many bytes of them."""

    def __init__(self, memory: SimulatedMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)  # a sharded tensor's shape is being worked out: no memory
        if not all(kind in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a sharded or quantised tensor: count the plain ones inside it
        if func.namespace == "c10d":
            return _communicate_through_copies(func, args, kwargs)
        result = func(*args, **kwargs)
        if allocates(func):
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
                    self._memory.count(tensor.untyped_storage())
            self._memory.check()
        return result


@functools.cache
def allocates(func: torch._ops.OpOverload) -> bool:
    """Whether an operation gives new tensors, not views of its inputs or the inputs themselves."""
    return any(returned.alias_info is None for returned in func._schema.returns)


def _communicate_through_copies(func, args, kwargs):  # type: ignore[no-untyped-def]
    """Run a collective on copies that are not counted.

    Gloo's threads let go of the tensors that they worked on a moment after the collective is over, which
    would make the count depend on timing.
    """
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copies.append((tensor, tensor.clone()))
        return copies[-1][1]

    staged_args, staged_kwargs = tree_map_only(torch.Tensor, copy, (args, kwargs))
    *_, work = result = func(*staged_args, **staged_kwargs)
    dist.Work.unbox(work).wait()
    for tensor, copied in copies:
        tensor.copy_(copied)
    return result


@contextmanager
def _follow_resizing(memory: SimulatedMemory) -> Iterator[None]:
    """Count what FSDP frees and allocates by resizing storages, which no dispatch mode sees.

    ``torch.UntypedStorage.resize_`` is replaced while the context lasts. Checked on torch 2.11 to 2.15.
    """
    resize = torch.UntypedStorage.resize_

    def counted_resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        memory.check(extra=nbytes - storage.nbytes())
        resize(storage, nbytes)
        memory.count(storage)
        return storage

    torch.UntypedStorage.resize_ = counted_resize  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
