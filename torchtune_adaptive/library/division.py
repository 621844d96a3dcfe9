"""The division of a rank's rows into micro-batches: of so many rows, or of as many as a token budget allows.

Each is a function that is given the size, and gives the positions of the rows in each micro-batch. On every
rank there are as many micro-batches, and as many rows in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchtune_adaptive.core import Budget, Ranks

Division = Callable[[int], list[Sequence[int]]]


def by_rows(count: int) -> Division:
    """Micro-batches of so many rows; the last may have fewer."""
    return lambda size: [range(start, min(start + size, count)) for start in range(0, count, size)]


def by_tokens(lengths: Sequence[int], ranks: Ranks) -> Division:
    """Micro-batches of at most so many tokens, padding included; a row that has more is alone.

    The shortest rows of all ranks go together, then those after them, and so on. As long as they are on the
    rank where they are longest, they are taken to be on each.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    everyones = ranks.gather([lengths[row] for row in order])
    longest = [max(each) for each in zip(*everyones, strict=True)]

    def divide(tokens: int) -> list[Sequence[int]]:
        budget = Budget(tuple((length, 1) for length in sorted({tokens, max(tokens, *longest)})))
        return [[order[at] for at in part] for part in budget.micro_batches(longest)]

    return divide
