"""The division of a rank's rows into micro-batches: of so many rows, or of at most so many tokens.

Each is a function that gives the positions of the rows in each micro-batch, on every rank as many in each.
Its arguments are the number of rows to leave out, which it gave first before, and the size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from torchtune_adaptive.core import Budget, Ranks

Division = Callable[[int, int], list[Sequence[int]]]


def by_rows(groups: Sequence[int]) -> Division:
    """Micro-batches of so many rows; the last of each group, which has so many, may have fewer."""

    def divide(done: int, size: int) -> list[Sequence[int]]:
        parts: list[Sequence[int]] = []
        for end in accumulate(groups):
            parts += [range(start, min(start + size, end)) for start in range(done, end, size)]
            done = max(done, end)
        return parts

    return divide


def by_tokens(lengths: Sequence[int], ranks: Ranks) -> Division:
    """Micro-batches of at most so many tokens, padding included; a row that has more is alone."""
    # A micro-batch is as long as its longest row on any rank, so more need not be known of the others'.
    longest = ranks.largest(sorted(lengths))

    def divide(done: int, tokens: int) -> list[Sequence[int]]:
        budget = Budget(tuple((length, 1) for length in sorted({tokens, max(tokens, *longest)})))
        return [*budget.micro_batches([lengths, longest], 0, done)]

    return divide
