"""How the rows of a step become micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from torchtune_adaptive.batching.packing import Budget, pack


class ByTokens:
    """Makes the micro-batches of a step under a budget; what a ``Loader`` asks.

    Args:
        budget: of a micro-batch.
        row_lengths: of every sample.
        padding_id: what rows are padded with.
        ignored: the label that is not trained on.
        buckets: lengths that batches are padded to, ascending, so that a compiled model sees few shapes;
            without any, batches are as long as their longest row.
    """

    def __init__(
        self,
        budget: Budget,
        row_lengths: Sequence[int],
        padding_id: int,
        ignored: int,
        buckets: Sequence[int] = (),
    ) -> None:
        self.budget = budget
        self.row_lengths = row_lengths
        self._lengths = [_rounded_up(buckets, length) for length in row_lengths]
        self._padding_id = padding_id
        self._ignored = ignored
        self._buckets = buckets

    @property
    def largest(self) -> int:
        return self.budget.tokens

    def padding_share(self, taken: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> float:
        """Of what was computed in some micro-batches, given their samples and shapes."""
        computed = sum(rows * length for _, (rows, length) in taken)
        tokens = sum(self.row_lengths[sample] for samples, _ in taken for sample in samples)
        return 1 - tokens / computed

    def state(self) -> list[list[int]]:
        return [list(each) for each in self.budget.measured]

    def portions(self, step: list[int], size: int, rank: int, ranks: int) -> list[Portion]:
        """``size`` is the budget's tokens, or as much less as rows are to be fewer."""
        budget = self.budget.shrunk(-(-self.budget.tokens // size))
        lengths = [self._lengths[sample] for sample in step]
        parts = pack(lengths, budget, ranks)[rank]
        shortest = step[min(range(len(step)), key=lengths.__getitem__)]
        return [
            Portion([step[i] for i in part]) if part else Portion([shortest], weightless=True)
            for part in parts
        ]

    def finish(self, portion: Portion, batch: dict[str, Any]) -> None:
        if portion.weightless:
            batch["labels"] = torch.full_like(batch["labels"], self._ignored)
        length = batch["tokens"].shape[-1]
        missing = _rounded_up(self._buckets, length) - length
        if missing > 0:
            batch["tokens"] = F.pad(batch["tokens"], (0, missing), value=self._padding_id)
            batch["labels"] = F.pad(batch["labels"], (0, missing), value=self._ignored)

    def sizes(self) -> list[int]:
        """What ``portions`` may be asked for: the whole budget, a half, and so on to single rows."""
        most = max(rows for _, rows in self.budget.measured)
        return [max(1, self.budget.tokens >> halvings) for halvings in range(most.bit_length())]


def length_buckets(longest: int, shortest: int, count: int = 8) -> list[int]:
    """A few lengths from the shortest to the longest, each the same share longer than the one before."""
    ratio = (longest / max(shortest, 1)) ** (1 / max(count - 1, 1))
    return sorted({min(longest, -(-round(shortest * ratio**i) // 8) * 8) for i in range(count)})


def _rounded_up(buckets: Sequence[int], length: int) -> int:
    return next((bucket for bucket in buckets if bucket >= length), length)


@dataclass(frozen=True)
class MicroBatch:
    """What one rank puts through one forward and backward."""

    sample_ids: tuple[int, ...]
    batch: dict[str, Any]


@dataclass(frozen=True)
class Portion:
    """The samples of one micro-batch."""

    sample_ids: list[int]
    weightless: bool = False
    """Whether it only keeps other ranks company: it is run, and nothing is learnt from it."""


class Packer(Protocol):
    """Makes micro-batches of rows by their lengths."""

    @property
    def largest(self) -> int:
        """The size that ``portions`` is asked for as long as nothing goes wrong."""

    def portions(self, step: list[int], size: int, rank: int, ranks: int) -> list[Portion]: ...

    def finish(self, portion: Portion, batch: dict[str, Any]) -> None:
        """Change a collated batch in place: pad it, or take its weight away."""

    def padding_share(self, taken: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> float:
        """Of what was computed in some micro-batches, given their samples and shapes."""

    def state(self) -> list[list[int]]:
        """What a checkpoint keeps."""
