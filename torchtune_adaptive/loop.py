"""The training loop that all recipes share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch.optim.lr_scheduler import LRScheduler
from torchtune import training
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from torchtune_adaptive.build import Environment, Optimizers
from torchtune_adaptive.checkpoints import Progress, last_saved
from torchtune_adaptive.config import BLOCK
from torchtune_adaptive.errors import ConfigError, OutOfMemoryElsewhere, TrainingOutOfMemory
from torchtune_adaptive.memory import DeviceMemory, is_out_of_memory
from torchtune_adaptive.recovery import Recovery
from torchtune_adaptive.report import Events, Split
from torchtune_adaptive.sampler import EpochRows, Loader, MicroBatch
from torchtune_adaptive.snapshot import Generators
from torchtune_adaptive.step import StepHalfApplied, StepOutcome, TrainStep
from torchtune_adaptive.watchdog import Watchdog

log = logging.getLogger(__name__)


def steps_per_epoch(rows_per_rank: int, split: Split, at_most: int | None) -> int:
    """The optimizer steps in an epoch; a run without any would save untrained weights as its result."""
    steps = rows_per_rank // (split.micro_batch * split.accumulation)
    if steps == 0:
        raise ConfigError(
            "batch_size",
            split.micro_batch,
            f"with gradient_accumulation_steps {split.accumulation} makes steps of "
            f"{split.micro_batch * split.accumulation} rows per rank, and the data has {rows_per_rank}",
            "Lower batch_size or gradient_accumulation_steps, or use more data",
        )
    return min(steps, at_most) if at_most is not None else steps


@dataclass(frozen=True)
class Logging:
    """What is written down, and how often."""

    metrics: Any
    """torchtune's metric logger; on rank 0 only."""
    every_n_steps: int
    memory: bool
    """Log the accelerator's peak memory as well."""

    @classmethod
    def from_config(cls, cfg: DictConfig, metrics: Any, environment: Environment) -> Logging:
        memory = cfg.get("log_peak_memory_stats", False)
        if memory and environment.device.type == "cpu":
            log.info(
                "log_peak_memory_stats is True, but a CPU has no such statistics; not logging them."
            )
            memory = False
        return cls(metrics, cfg.get("log_every_n_steps", 1), memory)


@dataclass
class TrainingLoop:
    """Trains, epoch by epoch, from where ``progress`` is to where it should be."""

    environment: Environment
    step: TrainStep
    optimizers: Optimizers
    lr_scheduler: LRScheduler | None
    loader: Loader
    split: Split
    recovery: Recovery | None
    """Decides about smaller micro-batches when memory runs out; None to stop then."""
    steps_per_epoch: int
    progress: Progress
    logging: Logging
    events: Events
    profiling: Profiling
    watchdog: Watchdog
    step_timeout: float
    save: Callable[[int], None]
    output_dir: Path

    def run(self) -> None:
        self.global_step = self.progress.epochs_run * self.steps_per_epoch
        self.redone_steps = self.retries = 0
        self.step.memory.release()
        self.step.memory.watch()
        self.profiling.start()
        self._losses: list[float] = []
        self._step_started = time.perf_counter()
        for epoch in range(self.progress.epochs_run, self.progress.total_epochs):
            with logging_redirect_tqdm([logging.getLogger("torchtune_adaptive")]):
                self._epoch(epoch)
            self.progress.epochs_run += 1
            self._save(epoch)
        self.profiling.stop()
        self._say_where_everything_is()

    def _epoch(self, epoch: int) -> None:
        # torchtune's loader draws one number from the run's generator in each epoch. So that dropout sees
        # the same numbers here as there, one is drawn.
        torch.empty((), dtype=torch.int64).random_()
        # What does not fill a step is left at the end, not carried into the next epoch's first step.
        rows = self.loader.epoch(epoch)
        bar = tqdm(total=self.steps_per_epoch, disable=not self.environment.is_rank_zero)
        for number in range(self.steps_per_epoch):
            self.profiling.before_step(epoch, number)
            outcome = self._take_step(rows)
            self.global_step += 1
            self._losses.append(outcome.loss)
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
            bar.update(1)
            bar.set_description(f"{epoch + 1}|{self.global_step}|Loss: {outcome.loss}")
            self._log(outcome)
            self._choose_next_size(outcome)
            self.profiling.after_step(epoch, number)
        bar.close()

    # --- a step, as often as it takes -----------------------------------------------------------------

    def _take_step(self, rows: EpochRows) -> StepOutcome:
        before = Generators(self.environment.device) if self.recovery is not None else None
        while True:
            split = self._split_now()
            self.watchdog.enter(
                f"step {self.global_step + 1} in micro-batches of {split.micro_batch} rows",
                self.step_timeout,
            )
            outcome = self._try_step(rows.step(self.rows_per_rank, split.micro_batch))
            if not outcome.lost:
                rows.advance(self.rows_per_rank)
                return outcome
            self._shrink(outcome)
            self.redone_steps += 1
            if before is not None:
                before.restore()  # dropout is part of the step

    def _try_step(self, micro_batches: Iterable[MicroBatch]) -> StepOutcome:
        try:
            for micro_batch in micro_batches:
                self.step.forward_backward(micro_batch.batch)
            return self.step.apply()
        except StepHalfApplied as half_applied:
            raise TrainingOutOfMemory(
                f"Out of memory in the {half_applied.phase} of step {self.global_step + 1}: some "
                "parameters may have changed and others not, so the step cannot be redone. "
                f"{self._advice()}"
            ) from None

    @property
    def rows_per_rank(self) -> int:
        """That each rank puts into a step, in however many micro-batches."""
        return self.split.micro_batch * self.split.accumulation

    def _split_now(self) -> Split:
        """The step's rows, in micro-batches of the size that is right now; the last may be smaller."""
        if self.recovery is None:
            return self.split
        size = self.recovery.size
        return Split(size, -(-self.rows_per_rank // size), self.split.ranks)

    def _shrink(self, outcome: StepOutcome) -> None:
        where = ", ".join(
            f"out of memory on rank {rank}, {phase}"
            for rank, phase in enumerate(outcome.failures)
            if phase
        )
        before = self._split_now()
        if self.recovery is None or not self.recovery.shrink():
            redo = f"; {BLOCK}.on_out_of_memory is raise" if self.recovery is None else ""
            raise TrainingOutOfMemory(
                f"Step {self.global_step + 1} in micro-batches of {before.micro_batch} rows: {where}{redo}. "
                f"{self._advice()}"
            )
        self.events.changed(before, self._split_now(), self.global_step + 1, where)

    def _choose_next_size(self, outcome: StepOutcome) -> None:
        """At the boundary between two steps; what the step saw is the same on every rank."""
        self.retries += outcome.retries
        if self.recovery is None:
            return
        before, next_step = self._split_now(), self.global_step + 1
        if self.recovery.is_thrashing(outcome.retries):
            reason = "allocation retries in two steps in a row"
            if self.recovery.shrink():
                self.events.changed(before, self._split_now(), next_step, reason)
            else:
                self.events.noticed(next_step, f"{reason}, and the micro-batch cannot shrink")
        elif self.recovery.grow_back():
            self.events.changed(before, self._split_now(), next_step, "calm again")

    def _advice(self) -> str:
        return (
            f"The last checkpoint: {last_saved(self.output_dir)}. Resume from it with a larger "
            f"{BLOCK}.headroom, a smaller {BLOCK}.ceiling or batch_size, enable_activation_checkpointing, or "
            "shorter rows (tokenizer.max_seq_len)."
        )

    # --- between steps --------------------------------------------------------------------------------

    def _save(self, epoch: int) -> None:
        self.watchdog.enter(f"saving the checkpoint of epoch {epoch}", patience=None)
        # What saving needs is not what training needs: neither should find the other's cached memory.
        self.step.memory.release()
        try:
            self.save(epoch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryElsewhere(
                f"Out of memory while saving the checkpoint of epoch {epoch}, not in a training step: the "
                "batch size is not to blame. Gathering the weights needs room for the largest of them: keep "
                f"the device for this process, or set enable_async_checkpointing. ({error})"
            ) from error
        self.step.memory.release()

    def _say_where_everything_is(self) -> None:
        if self._losses:
            log.info(
                f"Trained {len(self._losses)} steps of {self.split.global_batch} rows; loss "
                f"{_mean(self._losses[:5]):.2f} -> {_mean(self._losses[-5:]):.2f} (first and last steps)."
            )
        log.info(f"Checkpoint: {last_saved(self.output_dir)}. Everything else: {self.output_dir}.")

    def _log(self, outcome: StepOutcome) -> None:
        now = time.perf_counter()
        if self.environment.is_rank_zero and self.global_step % self.logging.every_n_steps == 0:
            seconds = now - self._step_started
            record: dict[str, Any] = {
                "loss": outcome.loss,
                "lr": float(self.optimizers.steppers[0].param_groups[0]["lr"]),
                "tokens_per_second_per_gpu": outcome.tokens / (seconds * self.environment.ranks),
                "batch_size": self.split.micro_batch,
                "global_batch_size": self.split.global_batch,
            }
            if self.recovery is not None:
                record.update(self._health(self.recovery))
            if self.logging.memory:
                record.update(training.get_memory_stats(device=self.environment.device))
            if outcome.gradient_norm is not None:
                record["grad_norm"] = outcome.gradient_norm
            self.logging.metrics.log_dict(record, step=self.global_step)
        self._step_started = time.perf_counter()

    def _health(self, recovery: Recovery) -> dict[str, float]:
        """How training does with its memory; the headroom is this rank's, since the last record."""
        memory = self.step.memory
        health: dict[str, float] = {
            "micro_batch_size": recovery.size,
            "redone_steps": self.redone_steps,
            "alloc_retries": self.retries,
        }
        if memory.measured:
            health["headroom"] = 1 - memory.usage().peak_bytes / memory.capacity()
            memory.watch()
        return health


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


class Profiling:
    """torchtune's profiler, and the memory history that it asks for in the first epoch, on rank 0."""

    def __init__(
        self, profiler: Any, settings: DictConfig, environment: Environment, memory: DeviceMemory
    ) -> None:
        self._profiler = profiler
        self._memory = memory
        self._first = self._last = -1
        if settings.enabled and settings.get("profile_memory", False) and environment.is_rank_zero:
            self._first = settings.wait_steps + settings.warmup_steps
            self._last = self._first + settings.active_steps

    def start(self) -> None:
        self._profiler.start()

    def stop(self) -> None:
        self._profiler.stop()

    def before_step(self, epoch: int, number: int) -> None:
        if epoch == 0 and number == self._first:
            self._memory.record_history(True)

    def after_step(self, epoch: int, number: int) -> None:
        if epoch == 0 and number == self._last:
            self._memory.record_history(False)
        self._profiler.step()
