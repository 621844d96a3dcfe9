"""The training loop that all recipes share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtune import training
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from torchtune_adaptive.batching.noise import NoiseScale
from torchtune_adaptive.batching.recovery import Recovery
from torchtune_adaptive.batching.split import Epochs, Split
from torchtune_adaptive.data.loader import EpochRows, Loader
from torchtune_adaptive.data.micro_batches import MicroBatch
from torchtune_adaptive.device.memory import is_out_of_memory
from torchtune_adaptive.errors import OutOfMemoryElsewhere, TrainingOutOfMemory
from torchtune_adaptive.ranks.watchdog import Watchdog
from torchtune_adaptive.schedule import Moment
from torchtune_adaptive.settings.adaptive import BLOCK
from torchtune_adaptive.setup.environment import Environment
from torchtune_adaptive.step.snapshot import Generators
from torchtune_adaptive.step.train_step import StepHalfApplied, StepOutcome, TrainStep
from torchtune_adaptive.train.checkpoint_folder import last_saved
from torchtune_adaptive.train.events import Events
from torchtune_adaptive.train.growth import Grown, Growth
from torchtune_adaptive.train.instruments import History, Logging, Profiling
from torchtune_adaptive.train.learning_rate import LearningRate
from torchtune_adaptive.train.progress import Progress
from torchtune_adaptive.train.stop import StopSignals

log = logging.getLogger(__name__)


@dataclass
class TrainingLoop:
    """Trains, epoch by epoch, from where ``progress`` is to where it should be."""

    environment: Environment
    step: TrainStep
    growth: Growth
    learning_rate: LearningRate
    make_recovery: Callable[[Split], Recovery | None]
    """What decides about smaller micro-batches when memory runs out; None to stop then."""
    loader: Loader
    epochs: Epochs
    progress: Progress
    logging: Logging
    events: Events
    profiling: Profiling
    watchdog: Watchdog
    step_timeout: float
    save: Callable[[str], None]
    """Saves a checkpoint of this name, with the progress as it is."""
    save_every_n_steps: int | None
    noise: NoiseScale | None
    """Of the gradient, where it is measured."""
    output_dir: Path
    stop: StopSignals

    def run(self) -> None:
        self._taken: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # in this step
        self.global_step = self.progress.epochs_run * self.epochs.base_steps
        self.samples = self.progress.epochs_run * self.epochs.base_steps * self.split.global_batch
        self.redone_steps = self.retries = 0
        self._noise_is_missing = False
        self.recovery = self.make_recovery(self.split)
        self.history = History()
        used = self._go_on(self.progress.training) if self.progress.training else 0
        self.step.memory.release()
        self.step.memory.watch()
        self.profiling.start()
        self._losses: list[float] = []
        self._step_started = time.perf_counter()
        with self.stop.while_training():
            for epoch in range(self.progress.epochs_run, self.progress.total_epochs):
                with logging_redirect_tqdm([logging.getLogger("torchtune_adaptive")]):
                    self._epoch(epoch, used)
                if self.stop.saved is not None:
                    break
                used = 0
                self.progress.epochs_run += 1
                self._save(f"{epoch}", used)
        self.profiling.stop()
        self._say_where_everything_is()

    @property
    def split(self) -> Split:
        """How the step is put together, as long as nothing goes wrong."""
        return self.growth.split

    def _epoch(self, epoch: int, used: int) -> None:
        rows = self.loader.epoch(epoch, used)
        if used == 0:
            # torchtune's loader draws one number from the run's generator in each epoch. So that dropout
            # sees the same numbers here as there, one is drawn.
            torch.empty((), dtype=torch.int64).random_()
            self._grow(self.growth.as_epoch_begins(epoch, self.samples))
        bar = tqdm(
            total=self.epochs.base_steps,
            initial=self.epochs.position(0, used),
            disable=not self.environment.is_rank_zero,
        )
        number = 0
        while self._is_room_for_a_step(epoch, rows):
            self.profiling.before_step(epoch, number)
            outcome = self._take_step(rows)
            self.global_step += 1
            self.samples += self.split.global_batch
            self._losses.append(outcome.loss)
            self.learning_rate.move_to(self.epochs.position(epoch, rows.used))
            bar.update(self.epochs.position(0, rows.used) - bar.n)
            bar.set_description(f"{epoch + 1}|{self.global_step}|Loss: {outcome.loss}")
            self._log(outcome)
            self._heed(outcome)
            self.profiling.after_step(epoch, number)
            number += 1
            is_due = self.save_every_n_steps and self.global_step % self.save_every_n_steps == 0
            if is_due or outcome.stop:
                self._save(f"{epoch}_step_{self.global_step}", rows.used)
            if outcome.stop:
                self.stop.saved = last_saved(self.output_dir)
                bar.close()
                return
        bar.close()
        # What does not fill a step is left at the end, not carried into the next epoch's first step.
        if left := self.epochs.rows - rows.used:
            log.info(
                f"Epoch {epoch}: {left} rows on each rank do not fill a step and are left out."
            )
        self.learning_rate.move_to(self.epochs.position(epoch, self.epochs.rows))

    def _is_room_for_a_step(self, epoch: int, rows: EpochRows) -> bool:
        """Once the schedule has said how large the step is to be."""
        self._grow(self.growth.before_step(self._moment(epoch, rows)))
        return rows.used + self.split.rows <= self.epochs.rows

    # --- the batch grows -------------------------------------------------------------------------------

    def _moment(self, epoch: int, rows: EpochRows) -> Moment:
        return Moment(
            samples=self.samples,
            epochs=self.epochs.progress(epoch, rows.used),
            start=self.growth.start.global_batch,
            current=self.split.global_batch,
            lr_factor=self.learning_rate.base_factor,
            noise=self.noise.scale_in_rows if self.noise else None,
        )

    def _grow(self, grown: Grown | None) -> None:
        if grown is not None:
            self.recovery = self.make_recovery(self.split)
            self.events.grown(
                grown.before, grown.after, grown.samples, self.global_step + 1, grown.reason
            )
        noise = self.noise.scale_in_rows if self.noise else None
        self.learning_rate.follow(self.split.global_batch, noise)

    # --- a step, as often as it takes -----------------------------------------------------------------

    def _take_step(self, rows: EpochRows) -> StepOutcome:
        before = Generators(self.environment.device) if self.recovery is not None else None
        while True:
            self.watchdog.enter(f"step {self.global_step + 1}{self._in_what()}", self.step_timeout)
            outcome = self._try_step(rows.step(self.split.rows, self._size))
            if not outcome.lost:
                rows.advance(self.split.rows)
                return outcome
            self._shrink(outcome)
            self.redone_steps += 1
            if before is not None:
                before.restore()  # dropout is part of the step

    def _try_step(self, micro_batches: Iterable[MicroBatch]) -> StepOutcome:
        self._taken = []
        try:
            for micro_batch in micro_batches:
                self._taken.append(
                    (micro_batch.sample_ids, tuple(micro_batch.batch["tokens"].shape))
                )
                self.step.forward_backward(micro_batch.batch)
            return self.step.apply()
        except StepHalfApplied as half_applied:
            raise TrainingOutOfMemory(
                f"Out of memory in the {half_applied.phase} of step {self.global_step + 1}: some "
                "parameters may have changed and others not, so the step cannot be redone. "
                f"{self._advice()}"
            ) from None

    @property
    def _size(self) -> int:
        """Of the micro-batches right now: in rows or, with a token budget, in tokens."""
        if self.recovery is not None:
            return self.recovery.size
        packer = self.loader.packer
        return packer.largest if packer is not None else self.split.micro_batch

    def _in_what(self) -> str:
        unit = "rows" if self.loader.packer is None else "tokens"
        return f" in micro-batches of {self._size} {unit}"

    def _changed(self, before: int, reason: str) -> None:
        """Write down that the size is another one from the next step on."""
        if self.loader.packer is not None:
            self.events.changed(self.global_step + 1, reason, token_budget=(before, self._size))
            return
        accumulation = tuple(-(-self.split.rows // size) for size in (before, self._size))
        self.events.changed(
            self.global_step + 1,
            reason,
            micro_batch=(before, self._size),
            accumulation=accumulation,  # type: ignore[arg-type]
        )

    def _shrink(self, outcome: StepOutcome) -> None:
        where = ", ".join(
            f"out of memory on rank {rank}, {phase}"
            for rank, phase in enumerate(outcome.failures)
            if phase
        )
        before = self._size
        if self.recovery is None or not self.recovery.shrink():
            redo = f"; {BLOCK}.on_out_of_memory is raise" if self.recovery is None else ""
            raise TrainingOutOfMemory(
                f"Step {self.global_step + 1}{self._in_what()}: {where}{redo}. {self._advice()}"
            )
        self._changed(before, where)

    def _heed(self, outcome: StepOutcome) -> None:
        """What a good step says about the next; it is the same on every rank."""
        self.retries += outcome.retries
        if self.noise is not None:
            self._listen(self.noise, outcome)
        if self.recovery is None:
            return
        before = self._size
        if self.recovery.is_thrashing(outcome.retries):
            reason = "allocation retries in two steps in a row"
            if self.recovery.shrink():
                self._changed(before, reason)
            else:
                self.events.noticed(
                    self.global_step + 1, f"{reason}, and the micro-batch cannot shrink"
                )
        elif self.recovery.grow_back():
            self._changed(before, "calm again")

    def _listen(self, noise: NoiseScale, outcome: StepOutcome) -> None:
        if outcome.noise is None and not self._noise_is_missing:
            self._noise_is_missing = True
            log.warning(
                "The gradient noise cannot be measured in this run: a step is one batch, and there is "
                "nothing smaller to hold against it. Use more ranks, or gradient accumulation."
            )
        noise.update(outcome.noise)

    def _advice(self) -> str:
        return (
            f"The last checkpoint: {last_saved(self.output_dir)}. Resume from it with a larger "
            f"{BLOCK}.headroom, a smaller {BLOCK}.ceiling or batch_size, enable_activation_checkpointing, or "
            "shorter rows (tokenizer.max_seq_len)."
        )

    # --- checkpoints ------------------------------------------------------------------------------------

    def _save(self, name: str, used: int) -> None:
        self.watchdog.enter(f"saving the checkpoint epoch_{name}", patience=None)
        # What saving needs is not what training needs: neither should find the other's cached memory.
        self.step.memory.release()
        try:
            self.progress.training = self._state(used)
            self.save(name)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryElsewhere(
                f"Out of memory while saving the checkpoint epoch_{name}, not in a training step: the "
                "batch size is not to blame. Gathering the weights needs room for the largest of them: keep "
                f"the device for this process, or set enable_async_checkpointing. ({error})"
            ) from error
        self.step.memory.release()

    def _state(self, used: int) -> dict[str, Any]:
        """All that a run needs to go on as if it had never stopped, beside model and optimizer."""
        ranks = self.step.ranks
        return {
            "global_step": self.global_step,
            "samples": self.samples,
            "samples_of_epoch": used * self.loader.ranks,
            "growth": self.growth.state_dict(),
            "learning_rate": self.learning_rate.state_dict(),
            "recovery": self.recovery.state_dict() if self.recovery else None,
            "noise": self.noise.state_dict() if self.noise else None,
            "token_budget": self.loader.packer.state() if self.loader.packer else None,
            "redone_steps": self.redone_steps,
            "retries": self.retries,
            "generators": ranks.gather(Generators(self.environment.device).state_dict()),
        }

    def _go_on(self, state: dict[str, Any]) -> int:
        """Take up a saved state; the rows of its epoch that each rank has used."""
        self.global_step, self.samples = state["global_step"], state["samples"]
        self.redone_steps, self.retries = state["redone_steps"], state["retries"]
        self.learning_rate.load_state_dict(state["learning_rate"])
        if self.recovery is not None and state["recovery"] is not None:
            self.recovery.load_state_dict(state["recovery"])
        if self.noise is not None and state["noise"] is not None:
            self.noise.load_state_dict(state["noise"])
        generators = state["generators"]
        if len(generators) == self.step.ranks.size:
            Generators(self.environment.device).load_state_dict(generators[self.step.ranks.rank])
        else:
            log.warning(
                f"The checkpoint is of {len(generators)} ranks and this run has {self.step.ranks.size}: the "
                "samples go on where they were, random numbers (dropout) do not."
            )
        return int(state["samples_of_epoch"]) // self.loader.ranks

    # --- what the user sees -----------------------------------------------------------------------------

    def _say_where_everything_is(self) -> None:
        if self._losses:
            log.info(
                f"Trained {len(self._losses)} steps, the last of {self.split.global_batch} rows; loss "
                f"{_mean(self._losses[:5]):.2f} -> {_mean(self._losses[-5:]):.2f} (first and last steps)."
            )
        adapts = self.recovery is not None or self.growth.grows
        if (
            adapts
            and self.environment.is_rank_zero
            and (plot := self.history.plot(self.output_dir))
        ):
            log.info(f"Batch, learning rate and loss over samples: {plot}.")
        log.info(f"Checkpoint: {last_saved(self.output_dir)}. Everything else: {self.output_dir}.")

    def _log(self, outcome: StepOutcome) -> None:
        now = time.perf_counter()
        split, lr = self.split, self.learning_rate.now
        micro_batch = max(rows for _, (rows, _) in self._taken)
        self.history.add(self.samples, split.global_batch, micro_batch, lr, outcome.loss)
        if self.environment.is_rank_zero and self.global_step % self.logging.every_n_steps == 0:
            seconds = now - self._step_started
            record: dict[str, Any] = {
                "loss": outcome.loss,
                "lr": lr,
                "tokens_per_second_per_gpu": outcome.tokens / (seconds * self.environment.ranks),
                "batch_size": self.split.micro_batch,
                "micro_batch_size": micro_batch,
                "gradient_accumulation_steps": len(self._taken),
                "global_batch_size": split.global_batch,
                "samples_seen": self.samples,
            }
            if self.loader.packer is not None:
                record["padding_share"] = self.loader.packer.padding_share(self._taken)
            if self.recovery is not None:
                record.update(self._health())
            if self.noise is not None and (scale := self.noise.scale_in_rows) is not None:
                record["gradient_noise_scale"] = scale
            if self.logging.memory:
                record.update(training.get_memory_stats(device=self.environment.device))
            if outcome.gradient_norm is not None:
                record["grad_norm"] = outcome.gradient_norm
            self.logging.metrics.log_dict(record, step=self.global_step)
        self._step_started = time.perf_counter()

    def _health(self) -> dict[str, float]:
        """How training does with its memory; the headroom is this rank's, since the last record."""
        memory = self.step.memory
        health: dict[str, float] = {
            "redone_steps": self.redone_steps,
            "alloc_retries": self.retries,
        }
        if memory.measured:
            health["headroom"] = 1 - memory.usage().peak_bytes / memory.capacity()
            memory.watch()
        return health


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
