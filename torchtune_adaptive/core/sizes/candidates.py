"""The sizes that a search may return."""

from __future__ import annotations

from typing import Literal

Rounding = Literal["power_of_two", "divisor", "none"]


def candidates(rounding: Rounding, ceiling: int, rows_per_step: int) -> tuple[int, ...]:
    """The sizes that may be returned, ascending; 1 is always among them.

    Args:
        rounding: ``power_of_two``, ``divisor`` (of ``rows_per_step``), or ``none``.
        ceiling: the largest size that may be a candidate.
        rows_per_step: the rows that one rank contributes to one optimizer step.
    """
    if rounding == "power_of_two":
        return tuple(1 << power for power in range(ceiling.bit_length()))
    if rounding == "divisor":
        return tuple(size for size in range(1, ceiling + 1) if rows_per_step % size == 0)
    if rounding == "none":
        return tuple(range(1, ceiling + 1))
    raise ValueError(f"no such rounding: {rounding!r}")
