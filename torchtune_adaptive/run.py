"""What every recipe's run has in common: how it starts, and how its parts become a training loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig
from torchtune import config, training

from torchtune_adaptive.batching.noise import NoiseScale
from torchtune_adaptive.batching.recovery import Recovery
from torchtune_adaptive.batching.split import Epochs, Split, epochs_of
from torchtune_adaptive.checkpoints.folder import last_saved, require_output_folder
from torchtune_adaptive.checkpoints.progress import Progress
from torchtune_adaptive.data.dataset import load_data
from torchtune_adaptive.data.loader import Loader, SampleOrder
from torchtune_adaptive.data.micro_batches import MicroBatches
from torchtune_adaptive.device import device_memory
from torchtune_adaptive.plan.background import BackgroundPlanner
from torchtune_adaptive.ranks.agreement import Ranks
from torchtune_adaptive.ranks.watchdog import Watchdog
from torchtune_adaptive.search.context import SearchContext
from torchtune_adaptive.search.decide import Batch, decide_batch
from torchtune_adaptive.settings.batch import configured_batch
from torchtune_adaptive.settings.checks import check
from torchtune_adaptive.settings.kinds import Kind
from torchtune_adaptive.setup.environment import start_environment
from torchtune_adaptive.setup.model import Model
from torchtune_adaptive.setup.optimizer import Optimizers, build_loss, build_lr_scheduler
from torchtune_adaptive.step.objective import NextTokenPrediction
from torchtune_adaptive.step.train_step import StepOptions, TrainStep
from torchtune_adaptive.train.adaptation import Adaptation
from torchtune_adaptive.train.events import Events
from torchtune_adaptive.train.growth import Growth, batch_increase
from torchtune_adaptive.train.instruments import Profiling, build_profiler
from torchtune_adaptive.train.learnable import require_something_to_learn
from torchtune_adaptive.train.learning_rate import LearningRate
from torchtune_adaptive.train.loop import TrainingLoop
from torchtune_adaptive.train.metrics import Logging, Metrics
from torchtune_adaptive.train.retry import StepRunner
from torchtune_adaptive.train.stop import StopSignals

Save = Callable[[Model, Optimizers, Progress, str], None]


class Run:
    """A run on this rank, from a checked config to a training loop.

    Use as a context around everything that the ranks do together: a rank that is lost is noticed there.

    Args:
        cfg: the config, with what the command line changed.
        kind: of recipe, ``full`` or ``lora``.

    Raises:
        ConfigError: a setting cannot work; nothing has been built yet.
    """

    def __init__(self, cfg: DictConfig, kind: Kind) -> None:
        self._cfg = cfg
        self.settings = check(cfg, kind)
        self._grow = batch_increase(cfg, self.settings)  # so that what cannot be made stops here
        patience = self.settings.agreement_timeout(cfg.get("compile", False))
        self.environment = start_environment(
            cfg, longest_wait=patience if self.settings.survives else None
        )
        self.ranks = Ranks(patience)
        if not self.settings.search_only:
            require_output_folder(cfg, self.ranks)
        self.stop = StopSignals(self.settings.stop_timeout)
        self.watchdog = Watchdog(
            self.ranks,
            limit=self.settings.rank_timeout,
            on_duty=self.settings.survives,
        )
        seed = training.set_seed(cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None))
        self.progress = Progress(seed, cfg.epochs, cfg.max_steps_per_epoch)
        # Before the model: a cap on memory holds for its weights as well.
        self.memory = device_memory(self.environment.device, self.settings.memory_limit)
        self.planner: BackgroundPlanner | None = None  # on rank 0, in parallel with the set-up
        if self.settings.predicts and self.environment.is_rank_zero:
            self.planner = BackgroundPlanner.begin(
                cfg, self.settings, self.ranks.size, self.memory.name
            )
        self.metrics: Any = None  # torchtune's metric logger, on rank 0
        if self.environment.is_rank_zero:
            self.metrics = config.instantiate(cfg.metric_logger)
            self.metrics.log_config(cfg)

    def __enter__(self) -> Run:
        self.stop.__enter__()
        self.watchdog.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.watchdog.__exit__(kind, error, traceback)
        finally:
            self._close_planner()
            self.stop.__exit__(kind, error, traceback)

    def _close_planner(self) -> None:
        if self.planner is not None:
            self.planner.close()
            self.planner = None

    def prepare(self, model: Model, optimizers: Optimizers, save: Save) -> TrainingLoop | None:
        """Make the training loop of a model and its optimizer, with the batch size found if it is asked for.

        The search stands here: everything that it needs is there, and what depends on the batch size is not
        yet made.

        Returns:
            The loop, or None where only the search was asked for.
        """
        cfg, settings, saved = self._cfg, self.settings, self.progress.training
        loss_fn = build_loss(cfg, self.environment, model.module)
        self.watchdog.enter("loading the data", patience=None)
        data = load_data(cfg, config.instantiate(cfg.tokenizer), loss_fn)
        order = SampleOrder(len(data.dataset), model.data_ranks, cfg.shuffle)
        measures_noise = settings.gradient_noise != "off" or getattr(
            self._grow, "needs_noise", False
        )
        step = self.train_step(model, optimizers, loss_fn, measures_noise)
        require_something_to_learn(data, step)
        context = SearchContext(
            cfg=cfg,
            settings=settings,
            configured=configured_batch(cfg, model.data_ranks),
            data=data,
            order=order,
            step=step,
            ranks=self.ranks,
            watchdog=self.watchdog,
        )
        batch = decide_batch(context, saved, self.planner)
        self._close_planner()
        if settings.search_only:
            return None
        return self._training_loop(model, optimizers, context, batch, save)

    def _training_loop(
        self,
        model: Model,
        optimizers: Optimizers,
        context: SearchContext,
        batch: Batch,
        save: Save,
    ) -> TrainingLoop:
        """The loop that trains with the batch that was decided on."""
        cfg, settings, data, step = self._cfg, self.settings, context.data, context.step
        epochs = epochs_of(
            context.order.rows_per_rank, batch.start, self.progress.max_steps_per_epoch
        )
        output_dir = Path(cfg.output_dir)
        events = Events(output_dir if self.environment.is_rank_zero else None)
        noise = NoiseScale() if step.options.measure_noise else None
        return TrainingLoop(
            runner=self._step_runner(step, batch.micro_batches, events),
            adaptation=self._adaptation(batch, optimizers, epochs, noise, events),
            loader=Loader(
                data.dataset,
                data.collate,
                context.order,
                model.data_rank,
                model.data_ranks,
                batch.micro_batches,
                settings.workers,
            ),
            progress=self.progress,
            metrics=Metrics(
                Logging.from_config(cfg, self.metrics, self.environment),
                self.environment,
                self.memory,
                watch_memory=settings.shrinks,
            ),
            profiling=Profiling(*build_profiler(cfg), self.environment, self.memory),
            save=lambda name: save(model, optimizers, self.progress, name),
            save_every_n_steps=cfg.get("save_every_n_steps"),
            output_dir=output_dir,
            stop=self.stop,
        )

    def _step_runner(
        self, step: TrainStep, micro_batches: MicroBatches, events: Events
    ) -> StepRunner:
        settings, checkpoints = self.settings, Path(self._cfg.checkpointer.output_dir)

        def recovery(split: Split) -> Recovery | None:
            if not settings.shrinks:
                return None
            sizes = micro_batches.full_size(split), micro_batches.smaller_sizes(split)
            return Recovery(*sizes, settings.grow_back_after)

        return StepRunner(
            step=step,
            micro_batches=micro_batches,
            make_recovery=recovery,
            watchdog=self.watchdog,
            step_timeout=settings.step_timeout,
            events=events,
            last_checkpoint=lambda: last_saved(checkpoints),
            wait_for_memory=settings.wait_for_memory,
        )

    def _adaptation(
        self,
        batch: Batch,
        optimizers: Optimizers,
        epochs: Epochs,
        noise: NoiseScale | None,
        events: Events,
    ) -> Adaptation:
        """How the batch and the learning rate change from here on; restored if the run is resumed."""
        settings, progress, saved = self.settings, self.progress, self.progress.training
        growth = Growth(
            batch.start,
            batch.largest,
            self._grow,
            settings.grow_past_memory,
            epochs.rows,
            self.ranks,
        )
        used = 0
        if saved:
            used = saved["samples_of_epoch"] // batch.start.ranks
            if settings.adapts and saved["growth"]["largest"] is not None:
                growth.load_state_dict(saved["growth"])
        learning_rate = LearningRate(
            optimizers,
            lambda position: build_lr_scheduler(
                self._cfg, optimizers, progress.total_epochs * epochs.base_steps, position
            ),
            position=epochs.position(progress.epochs_run, used),
            rule=settings.lr_scaling or (growth.schedule.lr_scaling if growth.schedule else "none"),
            half_life=settings.beta2 == "half_life",
            start=batch.start.global_batch,
        )
        adaptation = Adaptation(growth, learning_rate, noise, epochs, events)
        if self._grow is not None and not saved:
            adaptation.announce(progress.total_epochs)
        return adaptation

    def train_step(
        self,
        model: Model,
        optimizers: Optimizers,
        loss_fn: Any,
        measure_noise: bool = False,
    ) -> TrainStep:
        """The step of this run, for its trials and for its training."""
        clip = self._cfg.get("clip_grad_norm", None)
        return TrainStep(
            model=model.module,
            objective=NextTokenPrediction(loss_fn),
            optimizers=optimizers.steppers,
            device=self.environment.device,
            memory=self.memory,
            ranks=self.ranks,
            options=StepOptions(
                survive=self.settings.survives,
                activations=model.activations,
                clip_grad_norm=None if clip is None else float(clip),
                optimizer_in_backward=optimizers.in_backward,
                launched=self.watchdog.tick,
                measure_noise=measure_noise,
                stop_requested=lambda: self.stop.requested,
            ),
        )

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
        self.ranks.close()
        dist.destroy_process_group()
        self.stop.raise_if_stopped()
