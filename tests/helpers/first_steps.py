"""First steps of runs, compared by their allocations."""

from __future__ import annotations

from collections.abc import Iterable

from torchtune_adaptive.planner.memory.recorded_step import MemoryEvent


def in_use(events: Iterable[MemoryEvent]) -> list[tuple[int, int, int]]:
    """Each allocation, its stream, and what is in use then."""
    sizes: dict[int, int] = {}
    total = 0
    found = []
    for block, nbytes, stream in events:
        if nbytes >= 0:
            sizes[block] = nbytes
            total += nbytes
            found.append((nbytes, stream, total))
        else:
            total -= sizes.pop(block)
    return found
