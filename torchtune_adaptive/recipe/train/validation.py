"""Validation: the loss on data that is not trained on, every so many steps of training.

It changes nothing in training, to the bit: it runs between steps, in evaluation mode, without gradients, and
random numbers continue as if it had not been.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.utils.data import DataLoader

from torchtune_adaptive.common import OutOfMemoryElsewhere, counted
from torchtune_adaptive.core import (
    Batch,
    DeviceMemory,
    Generators,
    Loader,
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
        step: the step of training.
        data: the data to validate on.
        every_n_steps: the interval in steps.
        size: rows in a micro-batch; fewer after memory has run out, for the rest of the run.
        rank: the rank whose share of the rows to use, of so many ranks.
        workers: processes that fetch and collate ahead.
        watchdog: the watchdog, which is notified of what is being done.
        step_timeout: seconds that it may stand still.
        events: the record of what changes.
        record: a function that logs the result.
    """

    step: TrainStep
    data: Data
    every_n_steps: int
    size: int
    rank: int
    ranks: int
    workers: int
    watchdog: Watchdog
    step_timeout: float
    events: Events
    record: Record

    done: int = field(init=False, default=0)
    """The step after which it last ran, or was last given up."""

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
        try:
            weight, used = 0, 0
            sums: dict[str, float] = defaultdict(float)
            while used < self._rows_per_rank:
                for batch, counts in self._micro_batches(used):
                    self.watchdog.tick()
                    outcome = self.step.evaluate(batch, counts=counts)
                    if outcome.lost:
                        break
                    if outcome.stop:
                        return True
                    weight += outcome.weight
                    for name, mean in {"loss": outcome.loss, **outcome.metrics}.items():
                        sums[name] += mean * outcome.weight
                    used += self.size
                if outcome.lost and not self._shrink(outcome.trouble, number):
                    return False
        except Exception as error:
            if not DeviceMemory.is_out_of_memory(error):
                raise
            raise self._out_of_memory(error, number) from error
        finally:
            generators.restore()
            self.step.memory.release()
        self.done = number
        if weight == 0:
            self.events.noticed(number, "dataset_val has nothing to predict: all labels are masked")
            return False
        log.info(
            f"Validation after step {number}: loss {sums['loss'] / weight:.4f}, of {weight:,} "
            f"{self.step.objective.unit} in {counted(len(self.data.dataset), self.data.rows.sample)}, "
            f"{time.perf_counter() - started:.1f} s."
        )
        self.record(number, {f"val_{name}": value / weight for name, value in sums.items()})
        return False

    def _out_of_memory(self, error: Exception, number: int) -> OutOfMemoryElsewhere:
        """What ends a run where running out of memory is raised; where it is survived, an outcome tells."""
        samples = counted(self.size, self.data.rows.sample)
        return OutOfMemoryElsewhere(
            f"Out of memory on rank {self.step.ranks.rank} in the validation after step {number}, in "
            f"micro-batches of {samples}. Set a smaller batch_size_val. ({' '.join(str(error).split())})"
        )

    @property
    def _rows_per_rank(self) -> int:
        return -(-len(self.data.dataset) // self.ranks)

    def _micro_batches(self, used: int) -> Iterator[tuple[Batch, bool]]:
        """Micro-batches after this many rows on each rank, each with whether it counts."""
        mine = range(self.rank, len(self.data.dataset), self.ranks)
        portions = [mine[at : at + self.size] for at in range(used, self._rows_per_rank, self.size)]
        loader = DataLoader(
            self.data.dataset,
            batch_sampler=[list(portion) or [0] for portion in portions],
            collate_fn=self.data.collate,
            generator=torch.Generator(),  # or it would draw from the run's own
            num_workers=self.workers,
            worker_init_fn=Loader.leave_signals_to_the_run if self.workers else None,
        )
        for portion, batch in zip(portions, loader, strict=True):
            yield batch, len(portion) > 0

    def _shrink(self, where: str, number: int) -> bool:
        """Use smaller micro-batches; False, and validation is given up this time, if there are none."""
        if self.size == 1:
            self.done = number
            what = f"validation is left out: {where}, with a single row"
            self.events.noticed(number, what)
            return False
        before, self.size = self.size, self.size // 2
        self.events.changed(number, where, validation_batch=(before, self.size))
        return True
