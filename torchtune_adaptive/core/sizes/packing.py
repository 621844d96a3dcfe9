"""Pack rows of different lengths into micro-batches within the budget, the same number on every rank.

A micro-batch of ``rows`` rows is padded to its longest, and takes the memory of ``rows`` rows of that
length. How many rows fit is measured at some lengths (see ``Budget``); between them a rule applies that
never allows more than the measurements do.

Only rows of the same step are packed together. Which rows make up a step depends on the order of the epoch,
as without a budget, so the shuffling stays the same, and so does the gradient of every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COST_OF_A_MICRO_BATCH = 1 / 32
"""Cost besides its tokens (gathering weights, kernel launches), as a fraction of a full micro-batch."""


@dataclass(frozen=True)
class Budget:
    """The rows that fit, by length.

    Between two measured lengths, as many tokens fit as at the longer one, but never more rows than at the
    shorter one: the same number of tokens in shorter rows never takes more memory (attention takes less),
    and longer rows never take less.
    """

    measured: tuple[tuple[int, int], ...]
    """Pairs of a length and the rows that fit, ascending by length."""

    def __post_init__(self) -> None:
        lengths = [length for length, _ in self.measured]
        if not lengths or lengths != sorted(set(lengths)) or min(map(min, self.measured)) < 1:
            raise ValueError(f"measured: {self.measured!r} is not lengths, ascending, with rows")

    @classmethod
    def of_tokens(cls, tokens: int, longest: int) -> Budget:
        """The budget of at most ``tokens`` tokens, padding included."""
        if longest > tokens:
            raise ValueError(f"tokens: {tokens} is less than the longest row has, {longest}")
        return cls(((longest, tokens // longest),))

    @property
    def longest(self) -> int:
        return self.measured[-1][0]

    @property
    def tokens(self) -> int:
        """Tokens in the largest micro-batch of the longest rows."""
        length, rows = self.measured[-1]
        return length * rows

    def rows(self, length: int) -> int:
        """The rows that fit in a micro-batch whose longest row has ``length`` tokens; 0 if it is too long."""
        most = None  # at the next shorter length that was measured
        for measured, rows in self.measured:
            if length <= measured:
                fit = rows * measured // length
                return fit if most is None else min(fit, most)
            most = rows
        return 0

    def shrunk(self, divisor: int) -> Budget:
        """The budget with 1/``divisor`` of the rows at every length, but at least one."""
        return Budget(tuple((length, max(1, rows // divisor)) for length, rows in self.measured))

    def micro_batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """The micro-batches of rows of these lengths on one rank, as positions; see ``pack``."""
        [parts] = pack(lengths, self, ranks=1)
        return parts


def pack(lengths: Sequence[int], budget: Budget, ranks: int) -> list[list[list[int]]]:
    """The micro-batches of one step for each rank, as positions in ``lengths``, each of which occurs once.

    All ranks get the same number of micro-batches; some of the last ones may be empty. Rows are sorted by
    length and cut where the budget is reached, shortest first. This takes as few micro-batches as possible,
    and the one that is not full has the longest rows, where padding costs most. Then they are cut once more
    where that saves more padding than a micro-batch costs. If some ranks would have nothing to do at the
    end, the largest micro-batches are split for them.
    """
    parts: list[list[int]] = [[]]
    for row in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        fit = budget.rows(lengths[row])
        if fit == 0:
            raise ValueError(
                f"a row of {lengths[row]} tokens is longer than the budget's {budget.longest}"
            )
        if len(parts[-1]) + 1 > fit:
            parts.append([])
        parts[-1].append(row)

    def work(part: list[int]) -> int:
        """The tokens that a micro-batch computes, padding included; its longest row is its last."""
        return len(part) * lengths[part[-1]]

    parts = [piece for part in parts for piece in _pieces(part, lengths, budget)]
    while len(parts) % ranks and (divisible := [part for part in parts if len(part) > 1]):
        largest = max(divisible, key=work)
        half = len(largest) // 2
        parts.append(largest[half:])
        del largest[half:]
    # In rounds of micro-batches of similar size, so that no rank waits long for another.
    parts.sort(key=lambda part: (-work(part), part[0]))
    parts += [[] for _ in range(-len(parts) % ranks)]
    return [parts[rank::ranks] for rank in range(ranks)]


def _pieces(part: list[int], lengths: Sequence[int], budget: Budget) -> list[list[int]]:
    """Cut a micro-batch where the shorter rows save much padding by being separate."""
    longest = lengths[part[-1]]
    saved, cut = max(
        (((longest - lengths[part[i - 1]]) * i, i) for i in range(1, len(part))), default=(0, 0)
    )
    if saved <= budget.tokens * COST_OF_A_MICRO_BATCH:
        return [part]
    return [piece for half in (part[:cut], part[cut:]) for piece in _pieces(half, lengths, budget)]
