"""The division of a rank's rows into micro-batches: of so many rows, or of as many as a token budget allows.

Each gives the positions of the rows in each micro-batch, as many micro-batches on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchtune_adaptive.core import Budget, Ranks, pack


def by_rows(count: int, size: int) -> list[Sequence[int]]:
    """Micro-batches of ``size`` of the rows; the last may have fewer."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def by_tokens(lengths: Sequence[int], tokens: int, ranks: Ranks) -> list[Sequence[int]]:
    """Micro-batches of at most ``tokens`` tokens, padding included; a row that has more is alone.

    Every rank has its own rows, as many as the others but of other lengths, and splits some micro-batches
    once more where another rank has more of them.
    """
    budget = Budget(tuple((length, 1) for length in sorted({tokens, max(tokens, *lengths)})))
    [parts] = pack(lengths, budget, ranks=1)
    [parts] = pack(lengths, budget, ranks=1, at_least=ranks.spread(len(parts))[1])
    return [*parts]
