"""Full finetuning that finds its own batch size.

    tune run --nproc_per_node 8 adaptive_full_finetune_distributed --config llama3_1/8B_full \\
        use_maximum_batch_size=True
"""

# ruff: noqa: E402
from torchtune_adaptive.versions import require_supported_versions

require_supported_versions()  # first of all: with an unsupported version the imports below fail less clearly

import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch.distributed import destroy_process_group
from torchtune import config, training
from torchtune.recipe_interfaces import FTRecipeInterface

from torchtune_adaptive import build, launch
from torchtune_adaptive.checkpoints import FullCheckpoints, Progress
from torchtune_adaptive.config import check
from torchtune_adaptive.consensus import Ranks
from torchtune_adaptive.find import announce, find_batch_size
from torchtune_adaptive.loop import Logging, Profiling, TrainingLoop, steps_per_epoch
from torchtune_adaptive.memory import device_memory
from torchtune_adaptive.report import Split
from torchtune_adaptive.sampler import Loader, SampleOrder
from torchtune_adaptive.watchdog import Watchdog


class AdaptiveFullFinetuneRecipeDistributed(FTRecipeInterface):
    """Full finetuning of a dense text model with FSDP2, on one rank or many.

    It takes every key of torchtune's ``full_finetune_distributed`` and does the same with it, to the bit
    of the losses. What it adds:

    - ``use_maximum_batch_size: True`` searches for the largest micro-batch that fits, on the very model,
      optimizer and data of the run, then trains as if ``batch_size`` had been that.
    - ``adaptive_batching`` says how to search; see ``AdaptiveSettings`` for each key.

    Where torchtune goes on with a fault, this stops or does right: a misspelt key, a batch larger than the
    data, gradients left over from one epoch that leak into the next.

    Args:
        cfg: the config, with what the command line changed.

    Raises:
        ConfigError: a setting cannot work; nothing has been built yet.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._settings = check(cfg, "full")
        self._environment = build.start(cfg)
        self._ranks = Ranks(self._settings.agreement_timeout(cfg.get("compile", False)))
        self.watchdog = Watchdog(
            self._ranks,
            limit=self._settings.rank_timeout,
            on_duty=self._settings.use_maximum_batch_size,
        )
        self._metrics: Any = None  # torchtune's metric logger, on rank 0
        self._loop: TrainingLoop | None = None
        seed = training.set_seed(cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None))
        self._progress = Progress(seed, cfg.epochs, cfg.max_steps_per_epoch)

    def setup(self, cfg: DictConfig) -> None:
        """Build everything, each thing when what it needs is there. The batch size is found when a step can
        be tried, and before anything that depends on it."""
        environment, settings, progress = self._environment, self._settings, self._progress
        if environment.is_rank_zero:
            self._metrics = config.instantiate(cfg.metric_logger)
            self._metrics.log_config(cfg)

        self.watchdog.enter("loading the model", may_hang=False)
        memory = device_memory(environment.device, settings.memory_limit)
        self._checkpoints = FullCheckpoints(cfg)
        checkpoint = self._checkpoints.load()
        model = build.full_model(cfg, environment, checkpoint[training.MODEL_KEY])
        tokenizer = config.instantiate(cfg.tokenizer)
        optimizers = build.optimizers(
            cfg, environment, model.module, checkpoint.get(training.OPT_KEY)
        )
        if cfg.resume_from_checkpoint:
            if self._checkpoints.asynchronous:
                checkpoint = self._checkpoints.load_asynchronous(model.module, optimizers)
            progress.resume(checkpoint)
        loss_fn = build.loss(cfg, environment, model.module)
        self.watchdog.enter("loading the data", may_hang=False)
        data = build.data(cfg, tokenizer, loss_fn)
        order = SampleOrder(len(data.dataset), model.data_ranks, cfg.shuffle)
        step = build.train_step(
            cfg,
            environment,
            model,
            optimizers,
            loss_fn,
            memory=memory,
            ranks=self._ranks,
            survive=settings.use_maximum_batch_size,
            launched=self.watchdog.tick,
        )

        split = Split(cfg.batch_size, cfg.gradient_accumulation_steps, model.data_ranks)
        if settings.use_maximum_batch_size:
            report = find_batch_size(
                cfg=cfg,
                settings=settings,
                data=data,
                rows_per_rank=order.rows_per_rank,
                step=step,
                ranks=self._ranks,
                watchdog=self.watchdog,
            )
            split = report.after
            if environment.is_rank_zero:
                announce(report, Path(cfg.output_dir))
            if settings.search_only:
                return

        steps = steps_per_epoch(order.rows_per_rank, split, progress.max_steps_per_epoch)
        self._loop = TrainingLoop(
            environment=environment,
            step=step,
            optimizers=optimizers,
            lr_scheduler=build.lr_scheduler(
                cfg, optimizers, progress.total_epochs * steps, progress.epochs_run * steps
            ),
            loader=Loader(data.dataset, data.collate, order, model.data_rank, model.data_ranks),
            split=split,
            steps_per_epoch=steps,
            progress=progress,
            logging=Logging.from_config(cfg, self._metrics, environment),
            profiling=Profiling(*build.profiler(cfg), environment, memory),
            watchdog=self.watchdog,
            save=lambda epoch: self._checkpoints.save(model.module, optimizers, progress, epoch),
            output_dir=Path(cfg.output_dir),
        )

    def train(self) -> None:
        if self._loop is not None:
            self._loop.run()

    def cleanup(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        destroy_process_group()


@launch.recipe
def recipe_main(cfg: DictConfig) -> None:
    """Full finetuning that finds its own batch size."""
    config.log_config(recipe_name="AdaptiveFullFinetuneRecipeDistributed", cfg=cfg)
    recipe = AdaptiveFullFinetuneRecipeDistributed(cfg)
    with recipe.watchdog:
        recipe.setup(cfg)
        recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
