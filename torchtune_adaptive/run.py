"""What every recipe's run has in common: how it starts, and how its parts become a training loop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig
from torchtune import config, training

from torchtune_adaptive.batching.noise import NoiseScale
from torchtune_adaptive.batching.packing import Budget
from torchtune_adaptive.batching.recovery import Recovery
from torchtune_adaptive.batching.split import Epochs, Split, epochs_of, resumed_start
from torchtune_adaptive.batching.strategies import candidates
from torchtune_adaptive.data.dataset import Data, load_data
from torchtune_adaptive.data.loader import Loader, SampleOrder
from torchtune_adaptive.data.micro_batches import ByTokens
from torchtune_adaptive.data.row_lengths import row_lengths
from torchtune_adaptive.device import device_memory
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.plan.background import BackgroundPlanner
from torchtune_adaptive.ranks.agreement import Ranks
from torchtune_adaptive.ranks.watchdog import Watchdog
from torchtune_adaptive.search.batch_size import find_batch_size
from torchtune_adaptive.search.decide import announce
from torchtune_adaptive.search.report import SearchReport
from torchtune_adaptive.search.token_budget import find_token_budget
from torchtune_adaptive.settings.checks import check
from torchtune_adaptive.settings.kinds import Kind
from torchtune_adaptive.setup.environment import start_environment
from torchtune_adaptive.setup.model import Model
from torchtune_adaptive.setup.optimizer import Optimizers, build_loss, build_lr_scheduler
from torchtune_adaptive.step.train_step import TrainStep
from torchtune_adaptive.train.events import Events
from torchtune_adaptive.train.growth import Growth, batch_increase
from torchtune_adaptive.train.instruments import Logging, Profiling, build_profiler
from torchtune_adaptive.train.learning_rate import LearningRate
from torchtune_adaptive.train.loop import TrainingLoop
from torchtune_adaptive.train.progress import Progress

log = logging.getLogger(__name__)
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
        patience = self.settings.agreement_timeout(cfg.get("compile", False))
        self.environment = start_environment(cfg, longest_wait=patience)
        self.ranks = Ranks(patience)
        self.watchdog = Watchdog(
            self.ranks,
            limit=self.settings.rank_timeout,
            on_duty=self.settings.survives,
        )
        seed = training.set_seed(cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None))
        self.progress = Progress(seed, cfg.epochs, cfg.max_steps_per_epoch)
        # Before the model: a cap on memory holds for its weights as well.
        self.memory = device_memory(self.environment.device, self.settings.memory_limit)
        self.prediction: BackgroundPlanner | None = None  # on rank 0, beside the set-up
        if self.settings.predicts and self.environment.is_rank_zero:
            self.prediction = BackgroundPlanner.begin(
                cfg, self.settings, self.ranks.size, self.memory.name
            )
        self.metrics: Any = None  # torchtune's metric logger, on rank 0
        if self.environment.is_rank_zero:
            self.metrics = config.instantiate(cfg.metric_logger)
            self.metrics.log_config(cfg)

    def __enter__(self) -> Run:
        self.watchdog.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.watchdog.__exit__(kind, error, traceback)
        self._end_prediction()

    def _end_prediction(self) -> None:
        if self.prediction is not None:
            self.prediction.close()
            self.prediction = None

    def prepare(self, model: Model, optimizers: Optimizers, save: Save) -> TrainingLoop | None:
        """Make the training loop of a model and its optimizer, with the batch size found if it is asked for.

        The search stands here: everything that it needs is there, and what depends on the batch size is not
        yet made.

        Returns:
            The loop, or None where only the search was asked for.
        """
        cfg, environment, settings = self._cfg, self.environment, self.settings
        progress, state = self.progress, self.progress.training
        loss_fn = build_loss(cfg, environment, model.module)
        self.watchdog.enter("loading the data", patience=None)
        data = load_data(cfg, config.instantiate(cfg.tokenizer), loss_fn)
        order = SampleOrder(len(data.dataset), model.data_ranks, cfg.shuffle)
        grow = batch_increase(cfg, settings)
        measures_noise = settings.gradient_noise != "off" or getattr(grow, "needs_noise", False)
        step = self.train_step(model, optimizers, loss_fn, measures_noise)
        start = Split(cfg.batch_size, cfg.gradient_accumulation_steps, model.data_ranks)
        # What a run decided that is resumed; one that decided nothing binds nobody.
        known = state["growth"]["largest"] if state and settings.adapts else None
        largest: int | None = None
        packer = None
        if settings.budgets and data.packed:
            log.info("token_budget: packed rows are all full, so there is nothing for it to do.")
        elif settings.budgets:
            packer = self._find_token_budget(step, data, order, start)
            largest = order.rows_per_rank  # tokens are bounded, not rows
        if settings.searches:
            report = self._find_batch_size(step, data, order, known)
            self._end_prediction()
            largest = report.largest
            if settings.use_maximum_batch_size:
                start = report.after
            elif start.micro_batch > largest:
                raise ConfigError(
                    "batch_size",
                    start.micro_batch,
                    f"does not fit: {report.reason()}",
                    f"Use {largest}",
                )
        if settings.search_only:
            return None
        if state and known is not None:
            start = resumed_start(state["growth"], largest or known, model.data_ranks)
        epochs = epochs_of(order.rows_per_rank, start, progress.max_steps_per_epoch)
        growth = Growth(start, largest, grow, settings.grow_past_memory, epochs.rows, self.ranks)
        used = 0
        if state:
            used = state["samples_of_epoch"] // model.data_ranks
            if known is not None:
                growth.load_state_dict(state["growth"])
        elif grow is not None:
            self._say_what_is_ahead(growth, epochs)
        output_dir = Path(cfg.output_dir)
        learning_rate = LearningRate(
            optimizers,
            lambda position: build_lr_scheduler(
                cfg, optimizers, progress.total_epochs * epochs.base_steps, position
            ),
            position=epochs.position(progress.epochs_run, used),
            rule=settings.lr_scaling or (growth.schedule.lr_scaling if growth.schedule else "none"),
            half_life=settings.beta2 == "half_life",
            start=start.global_batch,
        )
        return TrainingLoop(
            environment=environment,
            step=step,
            growth=growth,
            learning_rate=learning_rate,
            make_recovery=lambda split: self._recovery(split, packer),
            loader=Loader(
                data.dataset,
                data.collate,
                order,
                model.data_rank,
                model.data_ranks,
                settings.workers,
                packer,
            ),
            epochs=epochs,
            progress=progress,
            logging=Logging.from_config(cfg, self.metrics, environment),
            events=Events(output_dir if environment.is_rank_zero else None),
            profiling=Profiling(*build_profiler(cfg), environment, self.memory),
            watchdog=self.watchdog,
            step_timeout=settings.step_timeout,
            save=lambda name: save(model, optimizers, progress, name),
            save_every_n_steps=cfg.get("save_every_n_steps"),
            noise=NoiseScale() if measures_noise else None,
            output_dir=output_dir,
        )

    def _say_what_is_ahead(self, growth: Growth, epochs: Epochs) -> None:
        total = self.progress.total_epochs
        steps = growth.steps_ahead(epochs, total)
        log.info(
            f"The batch starts at {growth.start.micro_batch} rows and may grow; the largest that fits is "
            f"{growth.largest}. The base schedule has {total * epochs.base_steps} steps; "
            + (
                f"the run will take {steps}."
                if steps
                else "how many the run takes is not known ahead."
            )
        )

    def _recovery(self, split: Split, packer: ByTokens | None) -> Recovery | None:
        if not self.settings.shrinks:
            return None
        if packer is not None:
            return Recovery(packer.largest, packer.sizes(), self.settings.grow_back_after)
        rounding = "divisor" if self.settings.keep_global_batch else self.settings.rounding
        smaller = candidates(rounding, split.micro_batch, split.rows)
        return Recovery(split.micro_batch, smaller, self.settings.grow_back_after)

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
            optimizers=optimizers.steppers,
            loss_fn=loss_fn,
            device=self.environment.device,
            memory=self.memory,
            ranks=self.ranks,
            survive=self.settings.survives,
            activations=model.activations,
            clip_grad_norm=None if clip is None else float(clip),
            optimizer_in_backward=optimizers.in_backward,
            launched=self.watchdog.tick,
            measure_noise=measure_noise,
        )

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
        self.ranks.close()
        dist.destroy_process_group()

    def _find_token_budget(
        self, step: TrainStep, data: Data, order: SampleOrder, start: Split
    ) -> ByTokens:
        cfg, settings = self._cfg, self.settings
        is_rank_zero = self.environment.is_rank_zero
        self.watchdog.enter("looking up the lengths of all rows", patience=None)
        lengths = row_lengths(data.dataset, cfg, self.ranks, settings.cache, is_rank_zero)
        state = self.progress.training
        saved = state["token_budget"] if state else None
        report = find_token_budget(
            cfg=cfg,
            settings=settings,
            data=data,
            order=order,
            row_lengths=lengths,
            split=start,
            step=step,
            ranks=self.ranks,
            watchdog=self.watchdog,
            known=Budget(tuple((length, rows) for length, rows in saved)) if saved else None,
        )
        if is_rank_zero:
            announce(report, Path(cfg.output_dir))
        return report.packer

    def _find_batch_size(
        self, step: TrainStep, data: Data, order: SampleOrder, known: int | None
    ) -> SearchReport:
        report = find_batch_size(
            cfg=self._cfg,
            settings=self.settings,
            data=data,
            rows_per_rank=order.rows_per_rank,
            step=step,
            ranks=self.ranks,
            watchdog=self.watchdog,
            known=known,
            prediction=self.prediction,
        )
        if self.environment.is_rank_zero:
            announce(report, Path(self._cfg.output_dir))
        return report
