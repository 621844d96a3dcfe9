"""The CPU as a device with a limit on its memory, which makes demo and tests possible without a GPU.

Every tensor that a step creates is counted, and the operation that passes the limit raises
``torch.OutOfMemoryError``, as a device would. The count is exact and repeatable.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psutil
import torch
import torch.distributed as dist

from torchtune_adaptive.common import launcher
from torchtune_adaptive.core.device.memory import DeviceMemory, Usage, plain_tensors
from torchtune_adaptive.core.private import (
    FakeTensor,
    TorchDispatchMode,
    schema_of,
    tree_leaves,
    tree_map_only,
)


@functools.cache
def allocates(func: Any) -> bool:
    """Whether an operation gives new tensors, not views of its inputs or the inputs themselves."""
    return any(returned.alias_info is None for returned in schema_of(func).returns)


class SimulatedMemory(DeviceMemory):
    """The CPU as a device with a limit: live tensor bytes, counted one by one.

    Nothing is counted until there is a limit, and then only what happens in ``running``: what the host
    does between steps (loading, collating, saving) happens outside a device's memory.
    """

    allocates = staticmethod(allocates)

    name = "simulated device"

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._in_use = 0
        self._peak = 0

    def capacity(self) -> int:
        if self.limit is not None:
            return self.limit
        return self._in_use + psutil.virtual_memory().available // launcher.local_size()

    @contextmanager
    def capped(self, limit: int) -> Iterator[None]:
        before, self.limit = self.limit, limit
        try:
            yield
        finally:
            self.limit = before

    def running(self) -> AbstractContextManager[object]:
        return super().running() if self.limit is None else self._counting()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        # Compiled regions run eager: within one, single operations could not be seen.
        with (
            torch.compiler.set_stance("force_eager"),
            _follow_resizing(self),
            _CountNewTensors(self),
        ):
            yield

    def statistics(self) -> Usage:
        return Usage(self._peak, self._peak, retries=0)  # there is no cache to give back

    def restart_peaks(self) -> None:
        self._peak = self._in_use

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
        if self.limit is None or self._in_use <= self.limit:  # what does not fit is never held
            self._peak = max(self._peak, self._in_use)

    def check(self, extra: int = 0) -> None:
        """Raise as a device would if more is in use, with ``extra`` bytes on top, than there is."""
        needed = self._in_use + extra
        if self.limit is not None and needed > self.limit:
            raise torch.OutOfMemoryError(
                f"simulated device out of memory: {needed:,} bytes needed at once, "
                f"and there are {self.limit:,}"
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
            return NotImplemented  # a sharded or quantized tensor: count the plain ones inside it
        if func.namespace == "c10d":
            return _communicate_through_copies(func, args, kwargs)
        if func.namespace == "_c10d_functional" and "wait_tensor" not in str(func):
            result = _communicate_functionally(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if allocates(func):
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
                    self._memory.count(tensor.untyped_storage())
            self._memory.check()
        return result


def _communicate_through_copies(func, args, kwargs):  # type: ignore[no-untyped-def]
    """Run a collective on copies that are not counted.

    Gloo's threads let go of the tensors that they worked on a moment after the collective is over, which
    would make the count depend on timing.
    """
    result, copies = _on_copies(func, args, kwargs)
    for leaf in tree_leaves(result):  # the work alone, or after the tensors
        if isinstance(leaf, torch.ScriptObject):
            dist.Work.unbox(leaf).wait()
    for tensor, copied in copies:
        tensor.copy_(copied)
    return result


def _communicate_functionally(func, args, kwargs):  # type: ignore[no-untyped-def]
    """The same for a collective that gives a new tensor, or the one that it was given: it is over before
    anybody waits for it."""
    result, copies = _on_copies(func, args, kwargs)
    originals = {id(copied): tensor for tensor, copied in copies}

    def finished(tensor: torch.Tensor) -> torch.Tensor:
        whole = torch.ops._c10d_functional.wait_tensor(tensor)
        given = originals.get(id(tensor))
        return whole.clone() if given is None else given.copy_(whole)

    return tree_map_only(torch.Tensor, finished, result)


def _on_copies(func, args, kwargs):  # type: ignore[no-untyped-def]
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copies.append((tensor, tensor.clone()))
        return copies[-1][1]

    staged_args, staged_kwargs = tree_map_only(torch.Tensor, copy, (args, kwargs))
    return func(*staged_args, **staged_kwargs), copies


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
