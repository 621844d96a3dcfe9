"""What every recipe's run has in common: how it starts, and how its parts become a training loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig
from torchtune import config, training

from torchtune_adaptive import build
from torchtune_adaptive.checkpoints import Progress
from torchtune_adaptive.config import check
from torchtune_adaptive.consensus import Ranks
from torchtune_adaptive.find import announce, find_batch_size
from torchtune_adaptive.loop import Logging, Profiling, TrainingLoop, steps_per_epoch
from torchtune_adaptive.memory import device_memory
from torchtune_adaptive.recovery import Recovery
from torchtune_adaptive.report import Events, Split
from torchtune_adaptive.sampler import Loader, SampleOrder
from torchtune_adaptive.search import candidates
from torchtune_adaptive.step import TrainStep
from torchtune_adaptive.watchdog import Watchdog

Save = Callable[[build.Model, build.Optimizers, Progress, int], None]


class Run:
    """A run on this rank, from a checked config to a training loop.

    Use as a context around everything that the ranks do together: a rank that is lost is noticed there.

    Args:
        cfg: the config, with what the command line changed.
        kind: of recipe, ``full`` or ``lora``.

    Raises:
        ConfigError: a setting cannot work; nothing has been built yet.
    """

    def __init__(self, cfg: DictConfig, kind: str) -> None:
        self._cfg = cfg
        self.settings = check(cfg, kind)
        self.environment = build.start(cfg)
        self.ranks = Ranks(self.settings.agreement_timeout(cfg.get("compile", False)))
        self.watchdog = Watchdog(
            self.ranks,
            limit=self.settings.rank_timeout,
            on_duty=self.settings.survives,
        )
        seed = training.set_seed(cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None))
        self.progress = Progress(seed, cfg.epochs, cfg.max_steps_per_epoch)
        # Before the model: a cap on memory holds for its weights as well.
        self.memory = device_memory(self.environment.device, self.settings.memory_limit)
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

    def prepare(
        self, model: build.Model, optimizers: build.Optimizers, save: Save
    ) -> TrainingLoop | None:
        """Make the training loop of a model and its optimizer, with the batch size found if it is asked for.

        The search stands here: everything that it needs is there, and what depends on the batch size is not
        yet made.

        Returns:
            The loop, or None where only the search was asked for.
        """
        cfg, environment, progress = self._cfg, self.environment, self.progress
        loss_fn = build.loss(cfg, environment, model.module)
        self.watchdog.enter("loading the data", patience=None)
        data = build.data(cfg, config.instantiate(cfg.tokenizer), loss_fn)
        order = SampleOrder(len(data.dataset), model.data_ranks, cfg.shuffle)
        step = self.train_step(model, optimizers, loss_fn)
        split = Split(cfg.batch_size, cfg.gradient_accumulation_steps, model.data_ranks)
        if self.settings.use_maximum_batch_size:
            split = self._find_batch_size(step, data, order)
        if self.settings.search_only:
            return None
        steps = steps_per_epoch(order.rows_per_rank, split, progress.max_steps_per_epoch)
        output_dir = Path(cfg.output_dir)
        return TrainingLoop(
            environment=environment,
            step=step,
            optimizers=optimizers,
            lr_scheduler=build.lr_scheduler(
                cfg, optimizers, progress.total_epochs * steps, progress.epochs_run * steps
            ),
            loader=Loader(data.dataset, data.collate, order, model.data_rank, model.data_ranks),
            split=split,
            recovery=self._recovery(split),
            steps_per_epoch=steps,
            progress=progress,
            logging=Logging.from_config(cfg, self.metrics, environment),
            events=Events(output_dir if environment.is_rank_zero else None),
            profiling=Profiling(*build.profiler(cfg), environment, self.memory),
            watchdog=self.watchdog,
            step_timeout=self.settings.step_timeout,
            save=lambda epoch: save(model, optimizers, progress, epoch),
            output_dir=output_dir,
        )

    def _recovery(self, split: Split) -> Recovery | None:
        if not self.settings.shrinks:
            return None
        rows = split.micro_batch * split.accumulation
        rounding = "divisor" if self.settings.keep_global_batch else self.settings.rounding
        smaller = candidates(rounding, split.micro_batch, rows)
        return Recovery(split.micro_batch, smaller, self.settings.grow_back_after)

    def train_step(
        self, model: build.Model, optimizers: build.Optimizers, loss_fn: Any
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
        )

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
        dist.destroy_process_group()

    def _find_batch_size(self, step: TrainStep, data: build.Data, order: SampleOrder) -> Split:
        report = find_batch_size(
            cfg=self._cfg,
            settings=self.settings,
            data=data,
            rows_per_rank=order.rows_per_rank,
            step=step,
            ranks=self.ranks,
            watchdog=self.watchdog,
        )
        if self.environment.is_rank_zero:
            announce(report, Path(self._cfg.output_dir))
        return report.after
