"""Validation: the loss on data that is not trained on, every so many steps of training.

It changes nothing in training, to the bit: it runs between steps, in evaluation mode, without gradients, and
random numbers continue as if it had not been.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from torchtune_adaptive.common import OutOfMemoryElsewhere, TrainingOutOfMemory, counted
from torchtune_adaptive.core import (
    Batch,
    DeviceMemory,
    Generators,
    Loader,
    Phase,
    TrainStep,
    Watchdog,
)
from torchtune_adaptive.recipe.data.dataset import Data
from torchtune_adaptive.recipe.train.events import Events

log = logging.getLogger(__name__)

Record = Callable[[int, dict[str, float]], None]
"""A function called with the number of a step and what to log about it."""


@dataclass
class Validation:
    """Validates on this rank's share of the data, in micro-batches that fit.

    Every row counts once. A rank that has no row left, where others have, evaluates one that does not count.

    Args:
        size: rows in a micro-batch; fewer after memory has run out.
        grow_back_after: steps of training after which a size that failed is tried again; None: never.
        rank: the rank whose share of the rows to use, of so many ranks.
        num_workers: processes that fetch and collate ahead.
        step_timeout: seconds that it may stand still.
        record: a function that logs the result.
    """

    step: TrainStep
    data: Data
    every_n_steps: int
    size: int
    grow_back_after: int | None
    rank: int
    ranks: int
    num_workers: int
    watchdog: Watchdog
    step_timeout: float
    events: Events
    record: Record

    done: int = field(init=False, default=0)
    """The step after which it last ran, or was last given up."""

    def __post_init__(self) -> None:
        self.phase = Phase("validation", self.step, self._sums, adjusted=self._adjusted)
        steps = self.grow_back_after
        self.phase.begin(self.size, None if steps is None else -(-steps // self.every_n_steps))

    def is_due(self, number: int) -> bool:
        return number > self.done and number % self.every_n_steps == 0

    def run(self, number: int) -> bool:
        """Validate after step ``number``, and log the loss.

        Returns:
            Whether a rank has been asked to stop; validation ends at once then.
        """
        self.watchdog.enter(f"validation after step {number}", self.step_timeout)
        started = time.perf_counter()
        generators = Generators(self.step.device)
        self.step.memory.release()  # what training has cached is not of validation's sizes
        self._number = number
        sums: torch.Tensor | int = 0
        try:
            for micro_batch in self.phase.run(self._rows_per_rank, self._micro_batches):
                self.watchdog.tick()
                if micro_batch.stop:
                    return True
                sums = sums + micro_batch.result
        except TrainingOutOfMemory as lost:
            if not lost.everywhere:  # the others go on, and would wait for this rank
                raise
            self.done = number
            self.events.noticed(number, f"validation is left out: {str(lost).rstrip('.')}")
            return False
        except Exception as error:
            if not DeviceMemory.is_out_of_memory(error):
                raise
            raise self._out_of_memory(error, number) from error
        finally:
            generators.restore()
            self.step.memory.release()
        self.done = number
        weight, means = self._means(sums)
        if weight == 0:
            self.events.noticed(number, "dataset_val has nothing to predict: all labels are masked")
            return False
        log.info(
            f"Validation after step {number}: loss {means['loss']:.4f}, of {weight:,} "
            f"{self.step.objective.unit} in {counted(len(self.data.dataset), self.data.rows.sample)}, "
            f"{time.perf_counter() - started:.1f} s."
        )
        self.record(number, {f"val_{name}": value for name, value in means.items()})
        return False

    def _sums(self, micro_batch: tuple[Batch, bool]) -> torch.Tensor:
        batch, counts = micro_batch
        sums = self.step.sums(batch)
        return sums if counts else torch.zeros_like(sums)

    def _means(self, sums: torch.Tensor | int) -> tuple[int, dict[str, float]]:
        """The weight of all ranks, and the means over it."""
        assert isinstance(sums, torch.Tensor)
        counted_sums = sums.tolist() if self.step.counts_rows else [0.0] * len(sums)
        weight, *others = map(sum, zip(*self.step.ranks.gather(counted_sums), strict=True))
        names = ("loss", *self.step.objective.metrics)
        return int(weight), {n: v / weight for n, v in zip(names, others, strict=True) if weight}

    def _out_of_memory(self, error: Exception, number: int) -> OutOfMemoryElsewhere:
        """What ends a run where running out of memory is raised; where it is survived, an outcome tells."""
        samples = counted(self.phase.size, self.data.rows.sample)
        return OutOfMemoryElsewhere(
            f"Out of memory on rank {self.step.ranks.rank} in the validation after step {number}, in "
            f"micro-batches of {samples}. Set a smaller batch_size_val. ({' '.join(str(error).split())})"
        )

    @property
    def _rows_per_rank(self) -> int:
        return -(-len(self.data.dataset) // self.ranks)

    def _micro_batches(self, used: int, size: int) -> Iterator[tuple[int, tuple[Batch, bool]]]:
        """Micro-batches after this many rows on each rank: their rows there, and whether they count here."""
        mine = range(self.rank, len(self.data.dataset), self.ranks)
        portions = [mine[at : at + size] for at in range(used, self._rows_per_rank, size)]
        samples = [list(portion) or [0] for portion in portions]
        batches = Loader.batches(self.data.dataset, samples, self.data.collate, self.num_workers)
        for portion, batch in zip(portions, batches, strict=True):
            yield size, (batch, len(portion) > 0)

    def _adjusted(self, reason: str, before: int, after: int) -> None:
        self.events.changed(self._number, reason, validation_batch=(before, after))
