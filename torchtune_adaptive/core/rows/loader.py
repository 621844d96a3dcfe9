"""The order of samples, and the loader that brings them.

The order of an epoch's samples is a function of the epoch and nothing else. How many of them are taken
at a time is decided where they are taken, so a micro-batch can change its size without losing or
repeating a sample. The order is torchtune's own: that of its distributed sampler, which deals the samples
out to the ranks one by one and repeats the first few if they do not divide.
"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, tee
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader, Dataset

from torchtune_adaptive.core.private import end_workers
from torchtune_adaptive.core.rows.micro_batches import MicroBatch, MicroBatches, Portion


@dataclass(frozen=True)
class SampleOrder:
    """The order in which the samples of an epoch are used."""

    samples: int
    """The number of samples in the dataset."""
    ranks: int
    """The number of data-parallel ranks that the run began with, each of which gets as many. On others, a
    resumed run keeps the order."""
    shuffle: bool
    """Whether the order is another one in each epoch, or always the dataset's."""
    seed: int = 0

    @property
    def rows_per_rank(self) -> int:
        """The number of samples of each rank in an epoch."""
        return -(-self.samples // self.ranks)

    @property
    def per_epoch(self) -> int:
        """The number of samples of all ranks in an epoch; those that are repeated count again."""
        return self.rows_per_rank * self.ranks

    def epoch(self, epoch: int) -> list[int]:
        """The samples of an epoch, in order; rank ``r`` of ``n`` uses those at ``r``, ``r + n``, ..."""
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.samples, generator=generator).tolist()
        else:
            order = list(range(self.samples))
        while missing := self.per_epoch - len(order):
            order += order[:missing]  # more than once only where there are fewer samples than ranks
        return order


@dataclass
class Loader:
    """Loads one rank's samples, in portions of any size."""

    dataset: Dataset[Any]
    collate: Callable[[list[Any]], dict[str, Any]]
    """Function that makes a batch of rows."""
    order: SampleOrder
    rank: int
    """The rank whose samples are loaded."""
    ranks: int
    micro_batches: MicroBatches
    num_workers: int = 0
    """Processes that fetch and collate ahead."""

    def epoch(self, epoch: int, used: int = 0) -> EpochRows:
        """This rank's samples of an epoch, of which all ranks together have used the first ``used``."""
        return EpochRows(self, self.order.epoch(epoch), used)

    def state_dict(self) -> None:
        """Nothing: the order of samples is a function of the epoch."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to restore."""

    def bring(self, steps: Iterable[list[Portion]]) -> Iterator[tuple[MicroBatch, dict[str, Any]]]:
        """Load the samples of each portion as one micro-batch."""
        # Twice: once to fetch, ahead if there are workers, and once to say what has come.
        fetched, brought = tee(portion for portions in steps for portion in portions)
        samples = (portion.sample_ids for portion in fetched)
        batches = self.batches(self.dataset, samples, self.collate, self.num_workers)
        for portion, batch in zip(brought, batches, strict=True):
            self.micro_batches.finish(portion, batch)
            ids = () if portion.weightless else tuple(portion.sample_ids)
            yield MicroBatch(ids, batch["tokens"].numel()), batch

    @staticmethod
    def batches(
        dataset: Dataset[Any],
        samples: Iterable[list[int]],
        collate: Callable[[list[Any]], dict[str, Any]],
        num_workers: int,
    ) -> Iterator[dict[str, Any]]:
        """The samples of each batch, fetched and collated; ahead and in other processes if there are workers.
        The run's random numbers stay as they are."""
        loader = DataLoader(
            dataset,
            batch_sampler=samples,
            collate_fn=collate,
            generator=torch.Generator(),  # or each loader would draw from the run's own
            num_workers=num_workers,
            worker_init_fn=_leave_signals_to_the_run if num_workers else None,
        )
        batches = iter(loader)
        if num_workers:
            _WITH_WORKERS.add(batches)
        return batches


_WITH_WORKERS: WeakSet[Iterator[dict[str, Any]]] = WeakSet()
"""Batches that workers fetch, as long as anything refers to them."""


def _leave_signals_to_the_run(_: int) -> None:
    """Ignore signals in a worker. The whole process group gets them, and the run needs its workers until it
    has saved a checkpoint."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """End the workers that are still there at exit. Python would send them the SIGTERM that they ignore, and
    then wait for them without a limit."""
    for batches in list(_WITH_WORKERS):
        end_workers(batches)


class EpochRows:
    """One rank's samples of an epoch, a step at a time.

    A step has the same samples until ``advance`` is called, in micro-batches of whatever size, so a retry in
    smaller ones loses and repeats nothing. They are counted over all ranks, and each step deals out its own,
    so another number of ranks goes on with the same samples.
    """

    can_be_left: ClassVar = True
    """Whether a resumed run could continue from here."""
    are_over: ClassVar = False
    """Whether training ends here, although there may be more rows."""

    def __init__(self, loader: Loader, sample_ids: list[int], used: int = 0) -> None:
        self._loader = loader
        self._sample_ids = sample_ids  # of all ranks
        self.used = used
        """Samples used so far, over all ranks."""
        self.loaded: list[MicroBatch] = []
        """The micro-batches of the last step that have been loaded so far."""
        self._running: tuple[int, int, int] | None = None
        """The step that micro-batches are being loaded for, its samples and the size of its portions."""

    def step(self, samples: int, size: int) -> Iterator[dict[str, Any]]:
        """This rank's share of the next ``samples``, in portions of ``size``; the last may be smaller."""
        if self._running != (self.used, samples, size):
            # Each step is divided once: for its samples to be fetched, and for their number to be known.
            to_fetch, self._steps_to_come = tee(self._steps(self.used, samples, size))
            self._micro_batches = self._loader.bring(to_fetch)
        self._running = (self.used + samples, samples, size)
        self.loaded = []
        portions = len(next(self._steps_to_come, ()))
        for micro_batch, batch in islice(self._micro_batches, portions):
            self.loaded.append(micro_batch)
            yield batch

    def begin_step(self) -> bool:
        """Get ready for the next step; False if there was a request to stop meanwhile."""
        return True

    def advance(self, samples: int) -> None:
        """Go on to the next step."""
        self.used += samples

    def metrics(self) -> dict[str, float]:
        """What is logged of the last step's rows."""
        return self._loader.micro_batches.metrics(self.loaded)

    def _steps(self, used: int, samples: int, size: int) -> Iterator[list[Portion]]:
        """The portions of each full step; samples that do not fill one are left out."""
        divide = self._loader.micro_batches.portions
        while used + samples <= len(self._sample_ids):
            step = self._sample_ids[used : used + samples]
            yield divide(step, size, self._loader.rank, self._loader.ranks)
            used += samples
