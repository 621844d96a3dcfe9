"""The line that says how the rows of a step are divided into micro-batches, and why so."""

from __future__ import annotations

from collections.abc import Sequence

from torchtune_adaptive.common import counted


def summary(
    groups: Sequence[int], size: int, tokens: bool, why: str, before: int, processes: int
) -> str:
    """Like ``16 rows a step = 4 x micro-batch 4 (8 rows: out of memory in forward); was 8 x 2``.

    Args:
        groups: the numbers of rows that may share a micro-batch.
        size: the most rows in a micro-batch, or the most ``tokens``.
        why: why it is that size, as it follows the sum.
        before: the rows in a micro-batch of the plain trainer.
        processes: how many take such a step together.
    """
    rows = sum(groups)
    each = f" on each of {processes} processes" if processes > 1 else ""
    was = "" if before == size else f"; was {-(-rows // before)} x {before}"
    parts = f"micro-batches of at most {counted(size, 'token')}" if tokens else _parts(groups, size)
    return f"{counted(rows, 'row')} a step{each} = {parts}{why}{was}"


def _parts(groups: Sequence[int], size: int) -> str:
    count = sum(-(-rows // size) for rows in groups)
    if any(rows % size for rows in groups):
        return f"{counted(count, 'micro-batch', 'micro-batches')} of at most {size}"
    return f"{count} x micro-batch {size}"
