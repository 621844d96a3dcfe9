"""Memory that an allocator caches, and the choice between it and a simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core import private
from torchtune_adaptive.core.device.memory import DeviceMemory, Usage
from torchtune_adaptive.core.device.simulated import SimulatedMemory

_PEAKS = ("reserved_bytes", "allocated_bytes", "active_bytes")


class AcceleratorMemory(DeviceMemory):
    """Memory behind a caching allocator: CUDA, and others as far as ``torch.accelerator`` goes.

    Args:
        device: the device; without an index, the current one of its type.
        limit: bytes that this process may use, or None for what the user's own memory fraction allows.

    Raises:
        UsageError: the device has no float64.
    """

    def __init__(self, device: torch.device, limit: int | None) -> None:
        if device.index is None:  # the allocator's functions want an index
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self._device = device
        module = torch.get_device_module(device)
        self.name = (
            module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
        )
        properties = getattr(module, "get_device_properties", lambda device: None)(device)
        if not getattr(properties, "has_fp64", True):  # XPU's name for it
            raise UsageError(
                f"device: {self.name} has no float64, in which the losses and norms of a step are summed. "
                "Use a device that has."
            )
        self._total = torch.accelerator.get_memory_info(device)[1]
        # A real cap, not arithmetic: the allocator itself refuses to pass it, and frees its cache first.
        self._set_fraction = getattr(module, "set_per_process_memory_fraction", None)
        get_fraction = getattr(module, "get_per_process_memory_fraction", None)
        # Set by the user in PYTORCH_ALLOC_CONF, or in code: never exceeded, and put back after a cap.
        self._own_fraction = float(get_fraction(device)) if get_fraction is not None else 1.0
        # As the allocator gives them. ``torch.accelerator`` would sort their hundred names for each number.
        self._nested_statistics = getattr(module, "memory_stats_as_nested_dict", None)
        self._limit = limit
        if limit is not None:
            self._cap(limit)

    def capacity(self) -> int:
        free, _ = torch.accelerator.get_memory_info(self._device)
        capacity = free + torch.accelerator.memory_reserved(self._device)
        capacity = min(capacity, int(self._own_fraction * self._total))
        return min(capacity, self._limit) if self._limit is not None else capacity

    @contextmanager
    def capped(self, limit: int) -> Iterator[None]:
        self._cap(limit)
        try:
            yield
        finally:
            self._cap(self._limit)

    def _cap(self, limit: int | None) -> None:
        if self._set_fraction is not None:
            share = 1.0 if limit is None else limit / self._total
            self._set_fraction(min(share, self._own_fraction), self._device)

    def statistics(self) -> Usage:
        if self._nested_statistics is not None:
            nested = self._nested_statistics(self._device)
            peaks = [nested.get(kind, {}).get("all", {}).get("peak", 0) for kind in _PEAKS]
            retries = nested.get("num_alloc_retries", 0)
        else:
            flat = torch.accelerator.memory_stats(self._device)
            peaks = [flat.get(f"{kind}.all.peak", 0) for kind in _PEAKS]
            retries = flat.get("num_alloc_retries", 0)
        reserved, allocated, active = peaks
        return Usage(reserved, allocated, retries, active)

    def restart_peaks(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)

    def in_use(self) -> int:
        return torch.accelerator.memory_allocated(self._device)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self._device)

    def release(self) -> None:
        super().release()
        # Emptying a cache waits for the device and keeps the interpreter's lock meanwhile, so that the
        # watchdog cannot be heard. Waiting for the device beforehand does not.
        self.synchronize()
        torch.accelerator.empty_cache()
        private.empty_host_cache()

    def record_history(self, enabled: bool) -> None:
        if self._device.type == "cuda":
            private.record_memory_history(self._device, enabled)


def device_memory(device: torch.device, limit: int | None = None) -> DeviceMemory:
    """The memory of ``device``, capped at ``limit`` bytes if one is given."""
    if device.type == "cpu":
        return SimulatedMemory(limit)
    return AcceleratorMemory(device, limit)
