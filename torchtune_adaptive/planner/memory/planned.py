"""The device that a plan is for, and what is assumed about it."""

from __future__ import annotations

import os

from torchtune_adaptive.common import human_bytes
from torchtune_adaptive.planner.memory.gpus import GIB, Gpu, sold_as
from torchtune_adaptive.planner.memory.peak import FRAGMENTATION, DeviceLimits

ERROR_BAND = 0.03
"""The error of predictions for a real device, as a share of the peak; for what is allocated, an allowance."""
_OLD_ATTENTION = (
    "attention: GPUs older than Ampere have no FlashAttention. In bfloat16, and where heads share keys and "
    "values and rows have no mask, torch writes all scores there, in float32"
)


def planned_gpu(
    kind: Gpu, ranks: int, headroom: float, memory: int | None = None
) -> tuple[DeviceLimits, tuple[str, ...]]:
    """A GPU of this kind in a run, and the assumptions about it; ``headroom`` is the share of the capacity
    that must stay free, ``memory`` the capacity of one process, if known."""
    if memory is None:
        source = _capacity(kind, ranks)
        return gpu_limits(kind.name, kind, ranks, kind.capacity(ranks), headroom, source)
    name = f"GPU with {_amount(memory)}"
    return gpu_limits(name, kind, ranks, memory, headroom, _nominal(memory, ranks))


def gpu_limits(
    name: str,
    kind: Gpu,
    ranks: int,
    capacity: int,
    headroom: float,
    source: str,
    correction: float = 1.0,
) -> tuple[DeviceLimits, tuple[str, ...]]:
    """A device with this capacity, and the assumptions about it; ``source`` tells where the capacity is
    from."""
    device = DeviceLimits(
        name=name,
        usable_bytes=int(capacity * (1 - headroom)),
        expandable=_has_expandable_segments(),
        workspaces=(kind.workspace, kind.workspace),
        band=ERROR_BAND,
        fragmentation=FRAGMENTATION if ranks > 1 else 0.0,
        correction=correction,
        before_ampere=kind.before_ampere,
    )
    assumed = (
        source,
        f"{human_bytes(capacity)} capacity; {human_bytes(device.usable_bytes)} usable "
        f"({headroom:.0%} headroom)",
        f"allocator: {'expandable segments' if device.expandable else 'default segments'}",
        f"cuBLAS workspaces: 2 x {human_bytes(kind.workspace)}",
        _OLD_ATTENTION if kind.before_ampere else "",
    )
    return device, tuple(line for line in assumed if line)


def _has_expandable_segments() -> bool:
    variables = (os.environ.get(f"PYTORCH{infix}_ALLOC_CONF", "") for infix in ("", "_CUDA"))
    return any("expandable_segments:true" in value.lower() for value in variables)


def _amount(memory: int) -> str:
    """``22.35 GiB``, and for a round number of GB that as well: that is how cards are sold."""
    gib = f"{memory / GIB:.4g} GiB"
    return gib if memory % 10**9 or not memory % GIB else f"{memory // 10**9} GB ({gib})"


def _nominal(memory: int, ranks: int) -> str:
    """A warning where the memory given is what cards are sold with, of which a process gets less."""
    card = sold_as(memory)
    if card is None:
        return ""
    return (
        f"{_amount(memory)} is taken as the capacity, though cards are sold with as much: of a {card.name} "
        f"the capacity is {human_bytes(card.capacity(ranks))} (--gpu {card.name})"
    )


def _capacity(kind: Gpu, ranks: int) -> str:
    taken = human_bytes(kind.total - kind.capacity(ranks))
    by = "the CUDA context and NCCL" if ranks > 1 else "the CUDA context"
    estimated = "" if kind.is_reported else " (an estimate)"
    return f"{kind.name}: {human_bytes(kind.total)} in total{estimated}, less {taken} for {by}"
