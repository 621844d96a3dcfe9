"""Memory behind a caching allocator: CUDA, and others as far as ``torch.accelerator`` goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchtune_adaptive.device.memory import DeviceMemory, Usage


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
