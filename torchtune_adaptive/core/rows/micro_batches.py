"""The division of a step into micro-batches: of a number of rows, or of as many as a token budget allows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F

from torchtune_adaptive.core.sizes.packing import Budget, pack
from torchtune_adaptive.core.sizes.split import Rounding, Split, candidates

Lengths: TypeAlias = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Portion:
    """The samples of one micro-batch, before they are loaded."""

    sample_ids: list[int]
    weightless: bool = False
    """Whether it becomes a ``Weightless`` one."""


@dataclass(frozen=True)
class Weightless:
    """A batch that only runs so that this rank takes part in the collectives of the others. Nothing is
    learned from it, and it does not count."""

    batch: Any


@dataclass(frozen=True)
class MicroBatch:
    """What is known of a micro-batch once it is loaded."""

    sample_ids: tuple[int, ...]
    tokens: int
    """Tokens, padding included."""

    @property
    def rows(self) -> int:
        return len(self.sample_ids)


class MicroBatches(ABC):
    """Divides each rank's share of a step into micro-batches.

    Their *size* is a number, of which smaller means less memory. What it counts depends on the way of
    dividing, and nobody else needs to know.
    """

    unit: ClassVar[str | None] = None
    """The thing that the size counts; None for samples, whatever a sample is."""
    needs_all_ranks: ClassVar[bool] = False
    """Whether a rank needs to know the samples of all ranks, in order to divide its own."""

    @abstractmethod
    def full_size(self, split: Split) -> int:
        """The size to use as long as memory suffices."""

    @abstractmethod
    def smaller_sizes(self, split: Split) -> Sequence[int]:
        """The sizes to choose from when memory runs out."""

    @abstractmethod
    def portions(self, step: list[int], size: int, rank: int, ranks: int) -> list[Portion]:
        """A rank's micro-batches of a step, given the samples of all ranks."""

    @abstractmethod
    def of_all_ranks(self, step: list[int], size: int, ranks: int) -> list[list[int]]:
        """The samples of each micro-batch of a step, of all ranks; of those that weigh something."""

    @abstractmethod
    def divide(
        self, lengths: Sequence[Sequence[int]], size: int, rank: int, done: int = 0
    ) -> list[Sequence[int]]:
        """A rank's micro-batches of rows that it alone has, as positions; see ``Budget.micro_batches``. They
        are as many on every rank, so some are empty where it has fewer rows than others."""

    @abstractmethod
    def change(self, before: int, after: int, split: Split) -> dict[str, tuple[int, int]]:
        """The quantities that a change of the size means to the user, each before and after."""

    def finish(self, batch: dict[str, Any]) -> None:  # noqa: B027 - nothing to do
        """Change a collated batch in place: pad it."""

    def metrics(self, step: Sequence[MicroBatch]) -> dict[str, float]:
        """The numbers to log about a step."""
        return {}

    def state(self) -> list[list[int]] | None:
        """The token budget, for a checkpoint: empty if it was given up, None if there was none."""
        return None


@dataclass(eq=False, repr=False)
class ByRows(MicroBatches):
    """Micro-batches of a number of rows; the last of a step may have fewer."""

    rounding: Rounding
    """The sizes that are allowed; see ``candidates``."""
    instead_of_budget: bool = False
    """Whether a token budget was found, and given up for this."""

    def full_size(self, split: Split) -> int:
        return split.micro_batch

    def smaller_sizes(self, split: Split) -> Sequence[int]:
        return candidates(self.rounding, split.micro_batch, split.rows)

    def portions(self, step: list[int], size: int, rank: int, ranks: int) -> list[Portion]:
        mine, most = step[rank::ranks], -(-len(step) // ranks)
        parts = [mine[i : i + size] for i in range(0, most, size)]
        return [Portion(part) if part else Portion(mine[:1], weightless=True) for part in parts]

    def of_all_ranks(self, step: list[int], size: int, ranks: int) -> list[list[int]]:
        return [
            each.sample_ids
            for rank in range(ranks)
            for each in self.portions(step, size, rank, ranks)
            if not each.weightless
        ]

    def divide(
        self, lengths: Sequence[Sequence[int]], size: int, rank: int, done: int = 0
    ) -> list[Sequence[int]]:
        rows, most = range(len(lengths[rank])), max(map(len, lengths))
        return [rows[i : i + size] for i in range(done, most, size)]

    def change(self, before: int, after: int, split: Split) -> dict[str, tuple[int, int]]:
        return {
            "micro_batch": (before, after),
            "accumulation": (-(-split.rows // before), -(-split.rows // after)),
        }

    def state(self) -> list[list[int]] | None:
        return [] if self.instead_of_budget else None


@dataclass(eq=False, repr=False)
class ByTokens(MicroBatches):
    """Micro-batches of as many rows as a token budget allows at their length."""

    unit = "token"
    needs_all_ranks = True

    budget: Budget
    """The budget of a micro-batch."""
    row_lengths: Lengths
    """The length of every sample."""
    padding_id: int
    """The token that rows are padded with."""
    ignored: int
    """The label that is not trained on."""
    buckets: Sequence[int] = ()
    """Lengths that batches are padded to, ascending, so that a compiled model sees few shapes; without any,
    batches are as long as their longest row."""

    @classmethod
    def of_own_rows(cls, budget: Budget, padding_id: int, ignored: int) -> ByTokens:
        """Micro-batches of rows that each rank has alone: their lengths are told when they are divided."""
        return cls(budget, np.zeros(0, dtype=np.int32), padding_id, ignored)

    def full_size(self, split: Split) -> int:
        return self.budget.tokens

    def smaller_sizes(self, split: Split) -> Sequence[int]:
        return self.budget.halves

    def portions(self, step: list[int], size: int, rank: int, ranks: int) -> list[Portion]:
        parts = self._packed(step, size, ranks)[rank]
        lengths = self._padded(step)
        shortest = step[min(range(len(step)), key=lengths.__getitem__)]
        return [
            Portion([step[i] for i in part]) if part else Portion([shortest], weightless=True)
            for part in parts
        ]

    def of_all_ranks(self, step: list[int], size: int, ranks: int) -> list[list[int]]:
        packed = self._packed(step, size, ranks)
        return [[step[i] for i in part] for parts in packed for part in parts if part]

    def _packed(self, step: list[int], size: int, ranks: int) -> list[list[list[int]]]:
        return pack(self._padded(step), self.budget.within(size), ranks)

    def divide(
        self, lengths: Sequence[Sequence[int]], size: int, rank: int, done: int = 0
    ) -> list[Sequence[int]]:
        return [*self.budget.within(size).micro_batches(lengths, rank, done)]

    def change(self, before: int, after: int, split: Split) -> dict[str, tuple[int, int]]:
        return {"token_budget": (before, after)}

    def finish(self, batch: dict[str, Any]) -> None:
        length = batch["tokens"].shape[-1]
        missing = _rounded_up(self.buckets, length) - length
        if missing > 0:
            batch["tokens"] = F.pad(batch["tokens"], (0, missing), value=self.padding_id)
            batch["labels"] = F.pad(batch["labels"], (0, missing), value=self.ignored)

    def metrics(self, step: Sequence[MicroBatch]) -> dict[str, float]:
        samples = [each.sample_ids for each in step if each.rows]
        in_all = sum(len(some) * max(self._padded(some)) for some in samples)
        tokens = sum(int(self.row_lengths[[*some]].sum()) for some in samples)
        return {"padding_share": 1 - tokens / in_all}

    def _padded(self, samples: Sequence[int]) -> list[int]:
        """The lengths that samples are padded to by themselves."""
        lengths: list[int] = self.row_lengths[[*samples]].tolist()
        return [_rounded_up(self.buckets, length) for length in lengths]

    def state(self) -> list[list[int]]:
        return [list(each) for each in self.budget.measured]


def _rounded_up(buckets: Sequence[int], length: int) -> int:
    return next((bucket for bucket in buckets if bucket >= length), length)
