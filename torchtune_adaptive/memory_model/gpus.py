"""GPUs that a run may be planned for, and how much of their memory a process can get.

Three words for amounts of memory, here and in what ``plan`` prints:

- *capacity*: what torch calls the device's total memory; less than the name of the card says.
- *available*: capacity - what the CUDA context and NCCL take before the first tensor.
- *limit*: available - headroom (``adaptive_batching.headroom``). A size fits if its peak is within it.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from torchtune_adaptive.errors import ConfigError

GIB, MIB = 1 << 30, 1 << 20

CONTEXT = GIB // 2
"""Assumption: a CUDA context with the kernels of a training step loaded."""

COMMUNICATION = GIB
"""Assumption: NCCL's buffers. Published for one node: 0.5 GiB (4 x A100) to 1.06 GB (8 x H100)."""


@dataclass(frozen=True)
class Gpu:
    """A GPU model."""

    name: str
    gib: float
    """The capacity."""
    workspace: int
    """What cuBLAS allocates for each stream and thread that uses it: 4096 KiB x 2 + 16 KiB x 8, and 32 MiB
    from Hopper on."""

    @property
    def capacity(self) -> int:
        return int(self.gib * GIB)

    def available(self, ranks: int) -> int:
        """Bytes that the allocator of one process can get in a run on ``ranks`` ranks."""
        return self.capacity - CONTEXT - (COMMUNICATION if ranks > 1 else 0)


_SMALL, _LARGE = 8 * MIB + 128 * 1024, 32 * MIB

# Capacities are those in published out-of-memory errors of torch. They differ by up to 0.2 GiB with the
# driver and the form factor of the card; --memory gives the exact amount.
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
    """The GPU of a name.

    Raises:
        ConfigError: it is not known.
    """
    if found := GPUS.get(name.lower()):
        return found
    close = get_close_matches(name.lower(), GPUS, n=1, cutoff=0.3)
    raise ConfigError(
        "--gpu",
        name,
        "is not a known GPU",
        (f"Did you mean {close[0]}? " if close else "")
        + f"Use one of {', '.join(GPUS)}, or give the memory available to one process with --memory",
    )
