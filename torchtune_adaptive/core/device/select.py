"""The memory of a device, whichever it is."""

from __future__ import annotations

import torch

from torchtune_adaptive.core.device.accelerator import AcceleratorMemory
from torchtune_adaptive.core.device.memory import DeviceMemory
from torchtune_adaptive.core.device.simulated import SimulatedMemory


def device_memory(device: torch.device, limit: int | None = None) -> DeviceMemory:
    """The memory of ``device``, capped at ``limit`` bytes if one is given."""
    if device.type == "cpu":
        return SimulatedMemory(limit)
    return AcceleratorMemory(device, limit)
