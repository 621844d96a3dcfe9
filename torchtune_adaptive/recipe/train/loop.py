"""The training loop that all recipes share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from torchtune_adaptive.common import OutOfMemoryElsewhere, counted
from torchtune_adaptive.core import (
    Adjustment,
    Batch,
    DeviceMemory,
    Generators,
    Loader,
    Recovery,
    Split,
    StepDone,
    StepRunner,
    Watchdog,
)
from torchtune_adaptive.recipe.checkpoints.progress import Progress
from torchtune_adaptive.recipe.checkpoints.training_state import NO_GENERATORS, TrainingState
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.knob_table import ACCUMULATION
from torchtune_adaptive.recipe.train.adaptation import Adaptation
from torchtune_adaptive.recipe.train.display import EpochDisplay, messages_beside_the_bar
from torchtune_adaptive.recipe.train.events import changes_in_words
from torchtune_adaptive.recipe.train.history import MarkKind
from torchtune_adaptive.recipe.train.instruments import Profiling
from torchtune_adaptive.recipe.train.metrics import Metrics, Summary, Trained
from torchtune_adaptive.recipe.train.rollouts import RolloutRows, Rollouts
from torchtune_adaptive.recipe.train.stop import StopSignals
from torchtune_adaptive.recipe.train.validation import Validation

log = logging.getLogger(__name__)


def how_to_go_on(last_checkpoint: str, shrinks: bool = True, no_retry: str | None = None) -> str:
    """What to do after a step that ran out of memory, and cannot be retried or not any smaller.

    ``shrinks`` says whether steps are retried, and ``no_retry`` why none can be.
    """
    if not shrinks and not no_retry:
        return (
            f"{BLOCK}.on_out_of_memory is raise: shrink retries such a step with less memory, and "
            "use_maximum_batch_size=True finds the largest batch_size that fits. The last checkpoint: "
            f"{last_checkpoint}."
        )
    return (
        f"{f'No step is retried: {no_retry}. ' if no_retry else ''}"
        f"The last checkpoint: {last_checkpoint}. Resume from it with a larger {BLOCK}.headroom, a smaller "
        f"{BLOCK}.ceiling or batch_size, enable_activation_checkpointing, or shorter rows "
        "(tokenizer.max_seq_len)."
    )


@dataclass
class TrainingLoop:
    """Trains, epoch by epoch, from where ``progress`` is to where it should be."""

    runner: StepRunner
    recovery: Callable[[Split], Recovery | None]
    """The factory of what decides about taking less memory; it gives None to stop when memory runs out."""
    watchdog: Watchdog
    step_timeout: float
    """Seconds that a step may stand still."""
    adaptation: Adaptation
    loader: Loader | Rollouts
    progress: Progress
    metrics: Metrics
    profiling: Profiling
    save: Callable[[str, bool], None]
    """A function that saves a checkpoint of this name, with the progress as it is; the last one, or not."""
    last_checkpoint: Callable[[], str]
    """A function that names the newest one."""
    save_every_n_steps: int | None
    stop: StopSignals
    """The signals that ask for an early end; training then saves after the step that is running."""
    snapshot: Callable[[str], None] = lambda name: None
    """A function that takes a snapshot of this name, with the progress as it is."""
    snapshot_every_n_steps: int | None = None
    before_step: Callable[[int], None] = lambda number: None
    """A function called before each step with its number, counted from 1."""
    validation: Validation | None = None
    sample: str = "row"
    save_every_n_epochs: int = 1

    global_step: int = field(init=False, default=0)
    samples: int = field(init=False, default=0)
    """Samples used since the run began, over all ranks."""
    _saved: int = field(init=False, default=0)
    """The step of the newest checkpoint."""
    summary: Summary | None = field(init=False, default=None)
    """Summary of the steps, once they are done; None if there were none."""

    def run(self) -> None:
        """Train to the end, or until a stop is requested."""
        epochs = self.adaptation.epochs
        self.global_step = self.progress.epochs_run * epochs.base_steps
        self.samples = self.global_step * self.adaptation.split.global_batch
        self._begin_batch()
        if self.validation is not None:
            self.validation.done = self.global_step
        used = self._resume(self.progress.training) if self.progress.training else 0
        if self.global_step:
            self.metrics.resume(self.global_step, self.samples, self.progress.history)
        self._validate()  # where a stop came before it
        self.runner.step.memory.release()
        self.profiling.start()
        self.metrics.begin()
        with self.stop.while_training():
            for epoch in range(self.progress.epochs_run, self.progress.total_epochs):
                with messages_beside_the_bar():
                    goes_on = self._epoch(epoch, used)
                if not goes_on:
                    break
                used = 0
                self.progress.epochs_run += 1
                is_last = not self.progress.is_unfinished
                if is_last or self.progress.epochs_run % self.save_every_n_epochs == 0:
                    self._save(f"{epoch}", used, is_last)
        self.profiling.stop()
        self._summarize()

    def _epoch(self, epoch: int, used: int) -> bool:
        """Train an epoch, of which some samples have been used; whether training goes on after it."""
        adaptation, epochs = self.adaptation, self.adaptation.epochs
        self._rows = rows = self.loader.epoch(epoch, used)
        if used == 0:
            # torchtune's loader draws one number from the run's generator in each epoch. So that dropout
            # sees the same numbers here as there, one is drawn.
            torch.empty((), dtype=torch.int64).random_()
            if adaptation.begin_epoch(epoch, self.samples, self.global_step + 1):
                self._begin_batch()
        display = EpochDisplay(
            epoch, self.progress.total_epochs, epochs.base_steps, epochs.position(0, used)
        )
        number = 0
        stop = is_due = is_snapshot_due = False
        while self._is_room_for_a_step(epoch):
            if rows.are_over:  # before the epoch is
                if self.global_step > self._saved:
                    self._save(f"{epoch}_step_{self.global_step}", rows.used, last=True)
                display.close()
                return False
            self.profiling.before_step(epoch, number)
            if rows.begin_step():
                outcome = self._step(epoch)
                display.step(epochs.position(0, rows.used), self.global_step, self.metrics.said())
                self.profiling.after_step(epoch, number)
                number += 1
                stop |= outcome.stop or self._validate()
                is_due |= self._is_multiple_of(self.save_every_n_steps)
                is_snapshot_due |= self._is_multiple_of(self.snapshot_every_n_steps)
            else:
                stop = True
            if not rows.can_be_left:
                continue
            if is_due or stop:
                self._save(f"{epoch}_step_{self.global_step}", rows.used, last=stop)
                is_due = is_snapshot_due = False
            elif is_snapshot_due:
                self._take_snapshot(f"{epoch}_step_{self.global_step}", rows.used)
                is_snapshot_due = False
            if stop:
                self.stop.saved = self.last_checkpoint()
                display.close()
                return False
        display.close()
        # Rows that do not fill a step are left out, not carried into the next epoch's first step.
        if left := epochs.samples - rows.used:
            log.info(
                f"Epoch {epoch}: leaving out {counted(left, self.sample)}, too few for a step."
            )
        adaptation.learning_rate.move_to(epochs.position(epoch, epochs.samples))
        return True

    def _is_room_for_a_step(self, epoch: int) -> bool:
        """Whether the epoch has rows for a step of the size that the schedule wants."""
        adaptation, used = self.adaptation, self._rows.used
        if adaptation.before_step(epoch, used, self.samples, self.global_step + 1):
            self._begin_batch()
        return used + adaptation.split.global_batch <= adaptation.epochs.samples

    def _begin_batch(self) -> None:
        """Use the batch as it is now from the next step on."""
        split = self.adaptation.split
        self.runner.begin(self.loader.micro_batches.full_size(split), self.recovery(split))

    def _step(self, epoch: int) -> StepDone:
        adaptation, split, rows = self.adaptation, self.adaptation.split, self._rows
        self.before_step(self.global_step + 1)
        self.runner.step.ask(adaptation.growth.asks)
        outcome = self.runner.run(self._micro_batches, self.global_step + 1, self._adjusted)
        rows.advance(split.global_batch)
        self.global_step += 1
        self.samples += split.global_batch
        if isinstance(rows, RolloutRows):
            for change in rows.changes:
                self.metrics.history.mark(MarkKind.CHANGED, self.samples, change)
        adaptation.after_step(epoch, rows.used, outcome)
        more = rows.metrics()
        if self.runner.recovery is not None:
            more["retried_steps"] = self.runner.retried_steps
            more["alloc_retries"] = self.runner.allocation_retries
        if (noise := adaptation.noise_scale) is not None:
            more["gradient_noise_scale"] = noise
        self.metrics.record(
            self.global_step,
            self.samples,
            split,
            outcome,
            adaptation.learning_rate.now,
            rows.loaded,
            more,
            rows.spent if isinstance(rows, RolloutRows) else None,
        )
        if outcome.asked and adaptation.agree(self.samples, self.global_step + 1):
            self._begin_batch()
        return outcome

    def _micro_batches(self, size: int) -> Iterator[Batch]:
        """The micro-batches of the next step, on this rank."""
        size_in_words = counted(size, self.runner.unit)
        activity = f"step {self.global_step + 1} in micro-batches of {size_in_words}"
        self.watchdog.enter(activity, self.step_timeout)
        return self._rows.step(self.adaptation.split.global_batch, size)

    def _adjusted(self, adjustment: Adjustment) -> None:
        """Put on record what is done about memory."""
        number, (before, after) = adjustment.step, adjustment.size
        self.metrics.measure_limit()  # another process may be why
        history, split = self.metrics.history, self.adaptation.split
        samples = self.samples + (number - self.global_step) * split.global_batch
        if number == self.global_step + 1:  # otherwise the step is done, and the next one is meant
            history.mark(MarkKind.RETRIED, samples, f"step {number:,} retried")
        what = dict(adjustment.knobs)
        if before != after:
            what |= self.loader.micro_batches.change(before, after, split)
        if what:
            self.adaptation.events.changed(number, adjustment.reason, **what)
            history.mark(
                MarkKind.CHANGED, samples, f"from step {number:,}: {changes_in_words(what)}"
            )
        else:
            self.adaptation.events.noticed(number, adjustment.reason)
        if adjustment.wait:
            self.watchdog.enter(f"step {number}, waiting for memory", patience=None)

    def _validate(self) -> bool:
        """Validate if it is time to; whether a rank has been asked to stop meanwhile."""
        validation = self.validation
        return (
            validation is not None
            and validation.is_due(self.global_step)
            and validation.run(self.global_step)
        )

    # --- checkpoints ------------------------------------------------------------------------------------

    def _save(self, name: str, used: int, last: bool) -> None:
        runner = self.runner
        self.watchdog.enter(f"saving the checkpoint epoch_{name}", patience=None)
        # What saving needs is not what training needs: neither should find the other's cached memory.
        runner.step.memory.release()
        try:
            self.progress.training = self._state(used)
            self.progress.history = self.metrics.state_dict()
            self.save(name, last)
        except Exception as error:
            if not DeviceMemory.is_out_of_memory(error):
                raise
            raise OutOfMemoryElsewhere(
                f"Out of memory while saving the checkpoint epoch_{name}, not in a training step, so the "
                "batch size is not the cause. Gathering the weights needs room for the largest of them: "
                "make sure no other process uses the device, or set enable_async_checkpointing. "
                f"({error})"
            ) from error
        self._saved = self.global_step
        runner.step.memory.release()
        self.metrics.start_step()  # saving is no part of the next step

    def _is_multiple_of(self, steps: int | None) -> bool:
        return steps is not None and self.global_step % steps == 0

    def _take_snapshot(self, name: str, used: int) -> None:
        self.watchdog.enter(f"taking the snapshot epoch_{name}", patience=None)
        self.progress.training = self._state(used)
        self.progress.history = self.metrics.state_dict()
        self.snapshot(name)
        self.metrics.start_step()

    def _state(self, used: int) -> TrainingState:
        ranks, device = self.runner.step.ranks, self.runner.step.device
        adaptation, dealt_to = self.adaptation, self.loader.order.ranks
        generators = ranks.gather_tensor(Generators(device).as_bytes())
        return TrainingState(
            global_step=self.global_step,
            samples=self.samples,
            samples_of_epoch=used,
            token_budget=self.loader.micro_batches.state(),
            generators=NO_GENERATORS if generators is None else generators,
            validated=self.global_step if self.validation is None else self.validation.done,
            growth=adaptation.growth.state(),
            learning_rate=adaptation.learning_rate.state_dict(),
            noise=adaptation.noise.state_dict() if adaptation.noise else None,
            rollouts=self.loader.state_dict(),
            dealt_to=None if dealt_to == adaptation.growth.start.ranks else dealt_to,
            **self.runner.state_dict(),
        )

    def _resume(self, saved: TrainingState) -> int:
        """Restore a saved state; gives the samples of its epoch that have been used."""
        self.global_step, self.samples = saved.global_step, saved.samples
        self._saved = self.global_step
        self.adaptation.resume(saved.learning_rate, saved.noise)
        self.runner.load_state_dict(saved.write())
        if saved.rollouts is not None:
            self.loader.load_state_dict(saved.rollouts)
        if self.validation is not None:
            self.validation.done = saved.validated
        ranks, device = self.runner.step.ranks, self.runner.step.device
        if len(saved.generators) == ranks.size:
            Generators(device).load_bytes(saved.generators[ranks.rank])
        # Those of all ranks, which only rank 0 needs to have, and only while it saves.
        self.progress.training = replace(saved, generators=NO_GENERATORS)
        return saved.samples_of_epoch

    def trained(self) -> Trained:
        """What training has come to so far."""
        runner, metrics = self.runner, self.metrics
        return Trained(
            split=self._split,
            steps=self.global_step,
            retried_steps=runner.retried_steps,
            may_change=runner.recovery is not None or self.adaptation.growth.grows,
            history=metrics.history if metrics.has_steps else None,
            summary=self.summary,
            sample=self.sample,
        )

    @property
    def _split(self) -> Split:
        """The batch, in micro-batches as they are now, which may be smaller than they should be."""
        split, size = self.adaptation.split, self.runner.size
        if self.loader.micro_batches.unit is not None or size >= split.micro_batch:
            return split
        return split.in_micro_batches(size)

    def _next_time(self) -> str:
        """The overrides to begin with the memory that steps take now, where it ran out; else nothing."""
        runner, growth = self.runner, self.adaptation.growth
        size, micro_batches = runner.size, self.loader.micro_batches
        found = [f"{key}={new}" for key, (_, new) in runner.relieved.items()]
        if micro_batches.unit is not None:
            if size < micro_batches.full_size(self.adaptation.split):
                found.append(f"{BLOCK}.token_budget={size}")
        elif (split := self._split) is not self.adaptation.split:
            fitting = next(n for n in range(size, 0, -1) if split.rows % n == 0)
            if not isinstance(self.loader, Rollouts):  # where it is prompts
                found.append(f"batch_size={fitting}")
            found.append(f"{ACCUMULATION}={split.rows // fitting}")
            if growth.largest is not None:
                found.append("use_maximum_batch_size=False")
        return " ".join(found)

    def _summarize(self) -> None:
        self.summary = self.metrics.summary(self._next_time())
        for line in self.trained().lines():
            log.info(line)
        log.info(f"Checkpoint: {self.last_checkpoint()}")
