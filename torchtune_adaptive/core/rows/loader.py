"""The loader, which brings samples in their order.

How many of them are taken at a time is decided where they are taken, so a micro-batch can change its size
without losing or repeating a sample.
"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice, tee
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader, Dataset

from torchtune_adaptive.core.private import end_workers
from torchtune_adaptive.core.rows.micro_batches import (
    MicroBatch,
    MicroBatches,
    Portion,
    Weightless,
)
from torchtune_adaptive.core.rows.order import SampleOrder


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
    running: Callable[[int, int, Sequence[int]], AbstractContextManager[Any]] = (
        lambda epoch, used, samples: nullcontext()
    )
    """Makes the context in which a micro-batch runs: given the epoch, the samples that all ranks have used of
    it before this step, and those of the micro-batch; none if its rows do not count."""

    def epoch(self, epoch: int, used: int = 0) -> EpochRows:
        """This rank's samples of an epoch, of which all ranks together have used the first ``used``."""
        return EpochRows(self, epoch, used)

    def state_dict(self) -> None:
        """Nothing: the order of samples is a function of the epoch."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to restore."""

    def bring(self, steps: Iterable[list[Portion]]) -> Iterator[tuple[MicroBatch, Any]]:
        """Load the samples of each portion as one micro-batch."""
        # Twice: once to fetch, ahead if there are workers, and once to say what has come.
        fetched, brought = tee(portion for portions in steps for portion in portions)
        samples = (portion.sample_ids for portion in fetched)
        batches = self.batches(self.dataset, samples, self.collate, self.num_workers)
        for portion, batch in zip(brought, batches, strict=True):
            self.micro_batches.finish(batch)
            ids = () if portion.weightless else tuple(portion.sample_ids)
            tokens = batch["tokens"].numel()
            yield MicroBatch(ids, tokens), Weightless(batch) if portion.weightless else batch

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

    def __init__(self, loader: Loader, epoch: int, used: int = 0) -> None:
        self._loader, self._epoch = loader, epoch
        self.used = used
        """Samples used so far, over all ranks."""
        self.loaded: list[MicroBatch] = []
        """The micro-batches of the last step that have been loaded so far."""
        self._running: tuple[int, int, int] | None = None
        """The step that micro-batches are being loaded for, its samples and the size of its portions."""
        self._know(alone=not loader.micro_batches.needs_all_ranks)

    def _know(self, alone: bool) -> None:
        """Keep the samples that are left: this rank's ``alone``, or those of all ranks."""
        # A rank that divides its own samples alone does it as if there were no others.
        rank, ranks = self._loader.rank, self._loader.ranks
        mine = (rank, ranks) if alone else (0, 1)
        self._samples = self._loader.order.share(self._epoch, *mine, self.used)
        self._begun, self._sharers = self.used, mine[1]
        self._rank, self._ranks = (0, 1) if alone else (rank, ranks)

    def step(self, samples: int, size: int) -> Iterator[Any]:
        """This rank's share of the next ``samples``, in portions of ``size``; the last may be smaller."""
        if self._running != (self.used, samples, size):
            if samples % self._sharers:
                self._know(alone=False)  # the next step's samples begin in the middle of a round
            # Each step is divided once: for its samples to be fetched, and for their number to be known.
            to_fetch, self._steps_to_come = tee(self._steps(self.used, samples, size))
            self._micro_batches = self._loader.bring(to_fetch)
        used = self.used
        self._running = (used + samples, samples, size)
        self.loaded = []
        portions = len(next(self._steps_to_come, ()))
        for micro_batch, batch in islice(self._micro_batches, portions):
            self.loaded.append(micro_batch)
            with self._loader.running(self._epoch, used, micro_batch.sample_ids):
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
        while used + samples <= self._loader.order.per_epoch:
            first, last = ((at - self._begun) // self._sharers for at in (used, used + samples))
            yield divide(self._samples[first:last].tolist(), size, self._rank, self._ranks)
            used += samples
