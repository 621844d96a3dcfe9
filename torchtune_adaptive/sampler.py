"""Which samples come when, and the loader that brings them.

The order of an epoch's samples is a function of the epoch and nothing else. How many of them are taken
at a time is decided where they are taken, so a micro-batch can change its size without losing or
repeating a sample. The order is torchtune's own: that of its distributed sampler, which deals the samples
out to the ranks one by one and repeats the first few if they do not divide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


@dataclass(frozen=True)
class MicroBatch:
    """What one rank puts through one forward and backward."""

    sample_ids: tuple[int, ...]
    batch: dict[str, Any]


class SampleOrder:
    """The order in which the samples of an epoch are used.

    Args:
        samples: how many samples the dataset has.
        ranks: the data-parallel ranks that share them.
        shuffle: another order in each epoch, or always the dataset's.
        seed: of the shuffling.
    """

    def __init__(self, samples: int, ranks: int, shuffle: bool, seed: int = 0) -> None:
        self._samples = samples
        self._ranks = ranks
        self._shuffle = shuffle
        self._seed = seed

    @property
    def rows_per_rank(self) -> int:
        """How many samples each rank has in an epoch."""
        return -(-self._samples // self._ranks)

    def epoch(self, epoch: int) -> list[int]:
        """The samples of an epoch, in order; rank ``r`` of ``n`` uses those at ``r``, ``r + n``, ..."""
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(self._samples, generator=generator).tolist()
        else:
            order = list(range(self._samples))
        missing = self.rows_per_rank * self._ranks - self._samples
        while missing > 0:  # more than once only where there are fewer samples than ranks
            order += order[:missing]
            missing = self.rows_per_rank * self._ranks - len(order)
        return order


class Loader:
    """Brings one rank's samples, in any portions.

    Args:
        dataset: by index.
        collate: makes a batch of rows.
        order: of the samples.
        rank: whose samples to bring, and of how many ranks.
        workers: processes that fetch and collate ahead.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], dict[str, Any]],
        order: SampleOrder,
        rank: int,
        ranks: int,
        workers: int = 0,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.order = order
        self._rank = rank
        self._ranks = ranks
        self._workers = workers

    def epoch(self, epoch: int, used: int = 0) -> EpochRows:
        """This rank's samples of an epoch, of which so many have been used."""
        return EpochRows(self, self.order.epoch(epoch)[self._rank :: self._ranks], used)

    def bring(self, portions: list[list[int]]) -> Iterator[MicroBatch]:
        """The samples with these numbers, each portion as one micro-batch."""
        loader = DataLoader(
            self.dataset,
            batch_sampler=portions,
            collate_fn=self.collate,
            generator=torch.Generator(),  # or each loader would draw from the run's own
            num_workers=self._workers,
        )
        for sample_ids, batch in zip(portions, loader, strict=True):
            yield MicroBatch(tuple(sample_ids), batch)


class EpochRows:
    """One rank's samples of an epoch, a step at a time.

    A step is the same until ``advance`` is called, in whatever micro-batches it is asked for: what takes
    it again, in smaller ones, loses and repeats nothing.
    """

    def __init__(self, loader: Loader, sample_ids: list[int], used: int = 0) -> None:
        self._loader = loader
        self._sample_ids = sample_ids
        self.used = used
        self._running: tuple[int, int, int] | None = None
        """For what step, from where and in what portions, the micro-batches being loaded are."""

    def step(self, rows: int, micro_batch: int) -> Iterator[MicroBatch]:
        """The next ``rows`` samples, ``micro_batch`` at a time; the last portion may be smaller."""
        if self._running != (self.used, rows, micro_batch):
            mine = self._sample_ids[self.used :]
            self._micro_batches = self._loader.bring(_portions(mine, rows, micro_batch))
        self._running = (self.used + rows, rows, micro_batch)
        return islice(self._micro_batches, -(-rows // micro_batch))

    def advance(self, rows: int) -> None:
        """The step is done."""
        self.used += rows


def _portions(sample_ids: list[int], rows: int, micro_batch: int) -> list[list[int]]:
    """The micro-batches of one full step after the other; what does not fill a step is left out."""
    full = len(sample_ids) // rows * rows
    return [
        sample_ids[i : min(i + micro_batch, start + rows)]
        for start in range(0, full, rows)
        for i in range(start, start + rows, micro_batch)
    ]
