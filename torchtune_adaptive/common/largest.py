"""The search for the largest number that fits."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest number that ``fits``, where none fits that is above one that does not; 0 if none does. The
    nearer the ``guess`` is to the answer, the fewer calls are made."""
    low, high = 0, 0
    rows, stride = max(1, guess), 1
    while not high or high - low > 1:
        if fits(rows):
            low = rows
        else:
            high = rows
        if low and high:
            rows = (low + high) // 2
        elif high == 1:
            return 0
        else:
            rows = max(1, rows + (-stride if high else stride))
            stride *= 2
    return low
