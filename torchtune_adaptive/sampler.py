"""Which samples come when, and the loader that brings them.

The order of an epoch's samples is a function of the epoch and nothing else. How many of them are taken
at a time is decided where they are taken, so a micro-batch can change its size without losing or
repeating a sample. The order is torchtune's own: that of its distributed sampler, which deals the samples
out to the ranks one by one and repeats the first few if they do not divide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], dict[str, Any]],
        order: SampleOrder,
        rank: int,
        ranks: int,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.order = order
        self._rank = rank
        self._ranks = ranks

    def micro_batches(self, epoch: int, rows: int, start: int = 0) -> Iterator[MicroBatch]:
        """This rank's samples of an epoch, ``rows`` at a time, from its ``start``-th on.

        What is left at the end, too few for ``rows``, is left out: compiled models and flex attention do
        not like another shape.
        """
        mine = self.order.epoch(epoch)[self._rank :: self._ranks][start:]
        portions = [mine[i : i + rows] for i in range(0, len(mine) - rows + 1, rows)]
        loader = DataLoader(
            self.dataset,
            batch_sampler=portions,
            collate_fn=self.collate,
            generator=torch.Generator(),  # or each loader would draw from the run's own
        )
        for sample_ids, batch in zip(portions, loader, strict=True):
            yield MicroBatch(tuple(sample_ids), batch)
