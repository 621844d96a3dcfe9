"""Pack rows of different lengths into micro-batches within the budget, the same number on every rank.

A micro-batch of ``rows`` rows is padded to its longest, and takes the memory of ``rows`` rows of that
length. How many rows fit is measured at some lengths (see ``Budget``); between them a rule applies that
never allows more than the measurements do.

Only rows of the same step are packed together. Which rows make up a step depends on the order of the epoch,
as without a budget, so the shuffling stays the same, and so does the gradient of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import zip_longest

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

    def within(self, tokens: int) -> Budget:
        """The budget with at most ``tokens`` tokens in a micro-batch of the longest rows, and so much less at
        every length, but at least one row."""
        divisor = -(-self.tokens // tokens)
        return Budget(tuple((length, max(1, rows // divisor)) for length, rows in self.measured))

    @property
    def halves(self) -> list[int]:
        """The tokens of the whole budget, of a half, and so on to single rows."""
        most = max(rows for _, rows in self.measured)
        return [max(1, self.tokens >> halvings) for halvings in range(most.bit_length())]

    def micro_batches(
        self, lengths: Sequence[Sequence[int]], rank: int = 0, done: int = 0
    ) -> list[list[int]]:
        """A rank's own rows in micro-batches, as positions: as many on every rank, with as many rows in each,
        if it has as many.

        The longest rows of all ranks go together, then those after them, and so on. As long as they are on
        the rank where they are longest, they are taken to be on each. A rank with fewer rows than others has
        fewer in the last micro-batches, or none.

        Args:
            lengths: those of each rank's rows.
            rank: the rank whose rows these are.
            done: how many rows to leave out: the first ones, whatever the budget of their micro-batches.
        """
        order = sorted(range(len(lengths[rank])), key=lengths[rank].__getitem__)
        longest_first = (sorted(each, reverse=True) for each in lengths)
        longest = [max(each) for each in zip_longest(*longest_first, fillvalue=0)][::-1]
        parts = _cut(longest[: len(longest) - done], self)
        missing = len(longest) - len(order)
        return [[order[at - missing] for at in part if at >= missing] for part in reversed(parts)]


def pack(lengths: Sequence[int], budget: Budget, ranks: int) -> list[list[list[int]]]:
    """The micro-batches of one step for each rank, as positions in ``lengths``, each of which occurs once.

    All ranks get the same number of micro-batches; some of the last ones may be empty. Rows are sorted by
    length and cut where the budget is reached, shortest first. This takes as few micro-batches as possible,
    and the one that is not full has the longest rows, where padding costs most. Then they are cut once more
    where that saves more padding than a micro-batch costs. If some ranks would have nothing to do at the
    end, the largest micro-batches are split for them.
    """

    def work(part: list[int]) -> int:
        """The tokens that a micro-batch computes, padding included; its longest row is its last."""
        return len(part) * lengths[part[-1]]

    parts = _cut(lengths, budget)
    _split_largest(parts, work, -len(parts) % ranks)
    # In rounds of micro-batches of similar size, so that no rank waits long for another.
    parts.sort(key=lambda part: (-work(part), part[0]))
    parts += [[] for _ in range(-len(parts) % ranks)]
    return [parts[rank::ranks] for rank in range(ranks)]


def _split_largest(parts: list[list[int]], work: Callable[[list[int]], int], times: int) -> None:
    """Split the micro-batch with the most work, of several the first, so many times, if any can be split."""
    if not times:
        return
    heap = [(-work(part), place) for place, part in enumerate(parts) if len(part) > 1]
    heapify(heap)
    while times and heap:
        _, place = heappop(heap)
        part = parts[place]
        half = len(part) // 2
        parts.append(part[half:])
        del part[half:]
        for changed in (place, len(parts) - 1):
            if len(parts[changed]) > 1:
                heappush(heap, (-work(parts[changed]), changed))
        times -= 1


def _cut(lengths: Sequence[int], budget: Budget) -> list[list[int]]:
    """The micro-batches of rows, as positions, shortest first; see ``pack``."""
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        fit = budget.rows(lengths[row])
        if fit == 0:
            raise ValueError(
                f"a row of {lengths[row]} tokens is longer than the budget's {budget.longest}"
            )
        if not parts or len(parts[-1]) + 1 > fit:
            parts.append([])
        parts[-1].append(row)
    return [piece for part in parts for piece in _pieces(part, lengths, budget)]


def _pieces(part: list[int], lengths: Sequence[int], budget: Budget) -> list[list[int]]:
    """Cut a micro-batch where the shorter rows save much padding by being separate."""
    longest = lengths[part[-1]]
    saved, cut = max(
        (((longest - lengths[part[i - 1]]) * i, i) for i in range(1, len(part))), default=(0, 0)
    )
    if saved <= budget.tokens * COST_OF_A_MICRO_BATCH:
        return [part]
    return [piece for half in (part[:cut], part[cut:]) for piece in _pieces(half, lengths, budget)]
