"""The training of a run, once its batch is decided: the loop, and what may change while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torchtune_adaptive.core import (
    Epochs,
    Loader,
    MicroBatches,
    NoiseScale,
    Recovery,
    Split,
    StepRunner,
    TrainStep,
    Watchdog,
)
from torchtune_adaptive.recipe.checkpoints.checkpoints import Checkpoints
from torchtune_adaptive.recipe.checkpoints.folder import last_saved
from torchtune_adaptive.recipe.checkpoints.progress import Progress
from torchtune_adaptive.recipe.kinds.recipe_kind import RecipeKind
from torchtune_adaptive.recipe.search.decide import DecidedBatch
from torchtune_adaptive.recipe.search.prober import ValidationRows
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.model import Model
from torchtune_adaptive.recipe.setup.optimizer import Optimizers, build_lr_scheduler
from torchtune_adaptive.recipe.train.adaptation import Adaptation
from torchtune_adaptive.recipe.train.attempts import Attempts
from torchtune_adaptive.recipe.train.events import Events
from torchtune_adaptive.recipe.train.growth import Growth
from torchtune_adaptive.recipe.train.instruments import Profiling
from torchtune_adaptive.recipe.train.learning_rate import LearningRate
from torchtune_adaptive.recipe.train.loop import TrainingLoop, how_to_go_on
from torchtune_adaptive.recipe.train.metric_logger import MetricLogger
from torchtune_adaptive.recipe.train.metrics import Logging, Metrics
from torchtune_adaptive.recipe.train.rollouts import Rollouts
from torchtune_adaptive.recipe.train.stop import StopSignals
from torchtune_adaptive.recipe.train.validation import Validation
from torchtune_adaptive.schedule import IncreaseFunction, Schedule


class RowSource(NamedTuple):
    """The rows of all steps."""

    loader: Loader | Rollouts
    epochs: Epochs
    sample: str
    """What a row is called."""


@dataclass(frozen=True)
class Training:
    """Makes the training loop of a run."""

    asked: Asked
    """Not the kind's: where the step finds that none can be retried, the run asks for something else."""
    watchdog: Watchdog
    stop: StopSignals
    progress: Progress
    kind: RecipeKind
    logger: MetricLogger | None
    """The metric logger, on rank 0."""
    attempts: Attempts | None
    """The attempts of the run, on rank 0."""
    grow: Schedule | IncreaseFunction | None
    """What makes the batch grow."""
    no_retry: str | None
    """Why no step can be retried, if none can."""

    def loop(
        self,
        model: Model,
        optimizers: Optimizers,
        step: TrainStep,
        batch: DecidedBatch,
        source: RowSource,
        checkpoints: Checkpoints,
    ) -> TrainingLoop:
        """The loop that trains with the batch that was decided on; it validates nothing yet."""
        asked, environment = self.asked, self.kind.environment
        settings = asked.settings

        def last_checkpoint() -> str:
            checkpoints.wait(settings.stop_timeout)  # it may be the one that is being written
            return last_saved(Path(asked.cfg.checkpointer.output_dir))

        noise = NoiseScale() if step.options.measure_noise else None
        metrics = Metrics(
            Logging.of(asked, self.logger, environment, self.attempts),
            environment,
            step.memory,
            watch_memory=settings.shrinks,
            counts_tokens=step.objective.unit == "tokens",
        )
        runner = StepRunner(
            step,
            advice=lambda: how_to_go_on(last_checkpoint(), settings.shrinks, self.no_retry),
            unit=batch.micro_batches.unit or source.sample,
            wait_for_memory=settings.wait_for_memory,
        )
        return TrainingLoop(
            runner=runner,
            recovery=partial(self._recovery, batch.micro_batches, len(runner.reliefs) - 1),
            watchdog=self.watchdog,
            step_timeout=settings.step_timeout,
            adaptation=self._adaptation(batch, optimizers, source.epochs, noise),
            loader=source.loader,
            progress=self.progress,
            metrics=metrics,
            profiling=Profiling(asked.cfg, environment, step.memory),
            save=partial(checkpoints.save, model, optimizers, self.progress),
            snapshot=partial(checkpoints.snapshot, model, optimizers, self.progress),
            last_checkpoint=last_checkpoint,
            save_every_n_steps=settings.save_every_n_steps,
            snapshot_every_n_steps=settings.snapshot_every_n_steps,
            stop=self.stop,
            before_step=partial(self.kind.before_step, model.module),
            sample=source.sample,
            save_every_n_epochs=asked["save_every_n_epochs"],
        )

    def validation(
        self, loop: TrainingLoop, model: Model, rows: ValidationRows, batch: DecidedBatch
    ) -> Validation:
        """What validates between the steps of a loop."""
        settings = self.asked.settings
        return Validation(
            step=loop.runner.step,
            data=rows.data,
            every_n_steps=self.asked["run_val_every_n_steps"],
            size=batch.validation or rows.size or batch.start.micro_batch,
            grow_back_after=settings.grow_back_after,
            rank=model.data_rank,
            ranks=model.data_ranks,
            num_workers=settings.num_workers,
            watchdog=self.watchdog,
            step_timeout=settings.step_timeout,
            events=loop.adaptation.events,
            record=loop.metrics.record_validation,
        )

    def _recovery(self, micro_batches: MicroBatches, reliefs: int, split: Split) -> Recovery | None:
        if not self.asked.settings.shrinks:
            return None
        sizes = micro_batches.full_size(split), micro_batches.smaller_sizes(split)
        return Recovery(*sizes, self.asked.settings.grow_back_after, reliefs)

    def _adaptation(
        self, batch: DecidedBatch, optimizers: Optimizers, epochs: Epochs, noise: NoiseScale | None
    ) -> Adaptation:
        """How the batch and the learning rate change from here on; restored if the run is resumed."""
        settings, progress, saved = self.asked.settings, self.progress, self.progress.training
        goes_on = saved and saved.growth.first_global_batch == batch.start.global_batch
        growth = Growth(
            batch.start,
            batch.largest,
            self.grow,
            settings.grow_past_memory,
            epochs.samples,
            self.kind.environment.ranks,
            saved.growth if saved and goes_on else None,
        )
        used = 0
        if saved:
            used = saved.samples_of_epoch
            if settings.adapts and saved.growth.largest is not None:
                growth.resume(saved.growth)
        total = progress.total_epochs * epochs.base_steps
        learning_rate = LearningRate(
            optimizers,
            lambda position: build_lr_scheduler(self.asked, optimizers, total, position),
            position=epochs.position(progress.epochs_run, used),
            rule=settings.lr_scaling or (growth.schedule.lr_scaling if growth.schedule else "none"),
            half_life=settings.beta2 == "half_life",
            start=batch.start.global_batch,
            total=total,
            anew=progress.takes_rate,
        )
        events = Events.of(self.asked, self.kind.environment.ranks)
        adaptation = Adaptation(growth, learning_rate, noise, epochs, events)
        if self.grow is not None and not saved:
            adaptation.announce(progress.total_epochs)
        return adaptation
