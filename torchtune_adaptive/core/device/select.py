"""The device's memory: how much there is, how much a step takes.

Two kinds of device answer the same questions: an accelerator from its caching allocator, the CPU by
simulation (see ``simulated``).
"""

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
