"""Devices that a run may be planned for, and how much of their memory a run can get.

A card has less than its name says, and the driver, the context and the communication library take their
part of it before the first tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from torchtune_adaptive.errors import ConfigError

GIB, MIB = 1 << 30, 1 << 20

CONTEXT = GIB // 2
"""Assumed: a CUDA context with the kernels of a training step loaded."""

COMMUNICATION = GIB
"""Assumed: NCCL's buffers. Published for one node: 0.5 GiB (4 x A100) to 1.06 GB (8 x H100)."""


@dataclass(frozen=True)
class Gpu:
    """One kind of device."""

    name: str
    gib: float
    """What torch calls its total capacity."""
    workspace: int
    """What cuBLAS takes for each stream and thread that it works on: 4096 KiB x 2 + 16 KiB x 8, and 32 MiB
    on Hopper and after."""

    def usable(self, ranks: int) -> int:
        """What the allocator of one of so many ranks can get."""
        return int(self.gib * GIB) - CONTEXT - (COMMUNICATION if ranks > 1 else 0)


_SMALL, _LARGE = 8 * MIB + 128 * 1024, 32 * MIB

# Capacities as torch prints them in out-of-memory errors that people have published. They differ by up to
# 0.2 GiB with the driver and the form of the card; --memory says it exactly.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("t4-16gb", 14.75, _SMALL),
        Gpu("l4-24gb", 22.03, _SMALL),
        Gpu("a10-24gb", 21.99, _SMALL),
        Gpu("rtx4090-24gb", 23.52, _SMALL),
        Gpu("a100-40gb", 39.39, _SMALL),
        Gpu("l40s-48gb", 44.40, _SMALL),
        Gpu("a100-80gb", 79.15, _SMALL),
        Gpu("h100-80gb", 79.11, _LARGE),
        Gpu("h200-141gb", 139.80, _LARGE),
        Gpu("b200-192gb", 178.35, _LARGE),
    )
}
DEFAULT = "h100-80gb"


def gpu(name: str) -> Gpu:
    """A device by its name.

    Raises:
        ConfigError: it is not known.
    """
    if found := GPUS.get(name.lower()):
        return found
    close = get_close_matches(name.lower(), GPUS, n=1, cutoff=0.3)
    raise ConfigError(
        "--gpu",
        name,
        "is not a known device",
        (f"Did you mean {close[0]}? " if close else "")
        + f"Use one of {', '.join(GPUS)}, or --memory with what a process can get",
    )
