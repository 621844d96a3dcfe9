"""What every recipe's run has in common: how it starts, and how its parts become a training loop."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig
from torchtune import training

from torchtune_adaptive.common import NoProgress, UsageError, counted, launcher
from torchtune_adaptive.core import (
    Epochs,
    Generators,
    Loader,
    Objective,
    SampleOrder,
    Split,
    StepOptions,
    TrainStep,
    Watchdog,
    device_memory,
    sample_dropout,
)
from torchtune_adaptive.recipe.checkpoints.checkpoints import Checkpoints
from torchtune_adaptive.recipe.checkpoints.config_changes import batch_keys, change, training_config
from torchtune_adaptive.recipe.checkpoints.folder import CheckpointFolder, take_output_folders
from torchtune_adaptive.recipe.checkpoints.progress import Progress
from torchtune_adaptive.recipe.components import check_components
from torchtune_adaptive.recipe.data.dataset import (
    Data,
    LoadedRows,
    as_validated,
    data_of,
    load_rows,
)
from torchtune_adaptive.recipe.data.row_lengths import RowLengths
from torchtune_adaptive.recipe.install import install
from torchtune_adaptive.recipe.kinds.by_name import recipe_kind
from torchtune_adaptive.recipe.origin import Origin, data_in_words, model_in_words
from torchtune_adaptive.recipe.plan.background import BackgroundPlanner
from torchtune_adaptive.recipe.record import Record
from torchtune_adaptive.recipe.search.decide import DecidedBatch, decide_batch
from torchtune_adaptive.recipe.search.prober import Prober, RowsToTry, ValidationRows
from torchtune_adaptive.recipe.settings.adaptive import AdaptiveSettings
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.checks import check, warn_of_unused_keys
from torchtune_adaptive.recipe.settings.kind_table import KINDS
from torchtune_adaptive.recipe.setup.context_parallel import attention_over_parts
from torchtune_adaptive.recipe.setup.environment import start_environment
from torchtune_adaptive.recipe.setup.flex_attention import compile_for_every_size, compiles
from torchtune_adaptive.recipe.setup.model import Model
from torchtune_adaptive.recipe.setup.model_switches import build_switches
from torchtune_adaptive.recipe.setup.optimizer import Optimizers
from torchtune_adaptive.recipe.train.attempts import Attempt, Attempts
from torchtune_adaptive.recipe.train.events import Events
from torchtune_adaptive.recipe.train.growth import batch_increase
from torchtune_adaptive.recipe.train.learnable import require_something_to_learn
from torchtune_adaptive.recipe.train.loop import TrainingLoop
from torchtune_adaptive.recipe.train.metric_logger import MetricLogger, start_metric_logger
from torchtune_adaptive.recipe.train.stop import StopSignals
from torchtune_adaptive.recipe.training import RowSource, Training

log = logging.getLogger(__name__)


class Run:
    """A run on this rank, from a checked config to a training loop.

    Use as a context around everything that the ranks do together: a rank that is lost is noticed there. A
    run that cannot begin leaves nothing behind, so another one can begin in the same process.

    Args:
        kind: the kind of recipe, one of ``recipe.settings.kind_table.KINDS``.

    Raises:
        ConfigError: a setting cannot work; nothing has been built yet.
    """

    def __init__(self, cfg: DictConfig, kind: str) -> None:
        install()
        self.asked = asked = check(cfg, KINDS[kind])
        warn_of_unused_keys(cfg, asked.kind)
        check_components(cfg, asked.kind)
        self._grow = batch_increase(asked)  # so that what cannot be made stops here
        compile_for_every_size(asked)
        patience = self.settings.agreement_timeout(compiles(asked))
        self.environment = start_environment(asked, patience, watched=self.settings.survives)
        self.ranks = self.environment.ranks
        self.checkpoints: Checkpoints | None = None
        """What the run saves; once there are some, it waits for them at its end."""
        self.record: Record | None = None  # on rank 0
        self.metrics: MetricLogger | None = None  # on rank 0
        self._rows: LoadedRows | None = None
        self._loop: TrainingLoop | None = None

    def __enter__(self) -> Run:
        with ExitStack() as begun:  # undone where the run cannot begin
            begun.callback(self._leave_ranks)
            self._until_exit = begun.enter_context(ExitStack())
            self._begin(self._until_exit)
            begun.pop_all()
        return self

    def _begin(self, until_exit: ExitStack) -> None:
        asked = self.asked
        context = until_exit.enter_context(attention_over_parts(asked, self.environment))
        self.environment = replace(self.environment, context=context)
        self._no_retry = asked.no_retry
        self.attempts: Attempts | None = None  # on rank 0
        self._say_whether_steps_are_retried()
        self.kind = recipe_kind(asked, self.environment)
        self.stop = until_exit.enter_context(StopSignals(self.settings.stop_timeout))
        folders = until_exit.enter_context(ExitStack())
        until_exit.push(self._end)
        self.watchdog = until_exit.enter_context(
            Watchdog(
                self.ranks,
                limit=self.settings.rank_timeout,
                on_duty=self.settings.survives,
                stop_requested=lambda: self.stop.requested,
            )
        )
        if not self.settings.search_only:
            self._take_output_folders(folders)
        self.watchdog.enter("starting", patience=None)
        until_exit.push(self._finish_saving)
        seed = training.set_seed(asked["seed"], debug_mode=asked["cudnn_deterministic_mode"])
        self.progress = Progress(
            seed,
            asked["epochs"],
            asked["max_steps_per_epoch"],
            config=training_config(asked.cfg, asked.kind),
            decides=batch_keys(asked.kind) if self.settings.adapts else (),
            takes_rate=self.settings.resume_learning_rate == "config",
        )
        # Before the model: a cap on memory holds for its weights as well.
        self.memory = device_memory(self.environment.device, self.settings.memory_limit)
        self.planner: BackgroundPlanner | None = None  # on rank 0, in parallel with the set-up
        asks = self.settings.predicts or self.settings.use_fastest_configuration
        if asks and self.ranks.is_zero:
            self.planner = BackgroundPlanner.begin(asked, self.ranks.size, self.memory.name)
        until_exit.callback(self._close_planner)
        attempts = self.attempts
        run = attempts.now.run if attempts is not None else None
        self.metrics = start_metric_logger(asked.cfg, self.ranks, run)
        if self.metrics is not None:
            origin = Origin.of(sys.argv, asked.kind.recipe)
            self.record = Record(asked.cfg, asked.kind.name, self.ranks.size, self.metrics, origin)
            self.record.attempts = attempts
            log.info(f"Config: {self.record.save_config()}")

    @property
    def settings(self) -> AdaptiveSettings:
        return self.asked.settings

    def __exit__(self, *error: Any) -> None:
        self._until_exit.__exit__(*error)

    def _take_output_folders(self, until_exit: ExitStack) -> None:
        """Take the folders, and count this attempt, on rank 0; the watchdogs of the others wait for it."""
        self.watchdog.enter("taking the output folders", self.settings.rank_timeout)
        if not self.ranks.is_zero:
            self.watchdog.tick()  # has done its part
        take_output_folders(self.asked, self.ranks, until_exit, self.watchdog.allow)
        self.attempts = self._attempts()
        if self.ranks.is_zero:
            self.watchdog.tick()
        if self.attempts is not None:
            until_exit.callback(self.attempts.close)

    def _finish_saving(self, _: object, error: BaseException | None, __: object) -> None:
        """Wait for what is being written in the background; after an error each rank by itself, as the others
        may not know of it."""
        if self.checkpoints is None or (error is not None and not self.checkpoints.unfinished):
            return
        limit, watchdog = self.settings.stop_timeout, self.watchdog
        watchdog.enter("finishing what is being saved", limit if error is None else None)
        is_done = self.checkpoints.wait(limit)
        if error is None:
            watchdog.enter("removing snapshots", limit)
            if not self.ranks.any(not is_done):
                self.checkpoints.close()

    def _end(self, _: object, error: BaseException | None, __: object) -> None:
        """Write what is left to be written of the run, on rank 0."""
        if self.attempts is not None and self.stop.reason is not None:
            self.attempts.saved_when_stopped()
        elif self.attempts is not None and error is None and self._loop is None:
            self.attempts.forget()
        if self.record is not None:
            trained = self._loop.trained() if self._loop else None
            self.record.close(error or self.stop.reason, trained)
        if self.metrics is not None and error is None:
            self.metrics.close()

    def _attempts(self) -> Attempts | None:
        """The attempts of this run, on rank 0.

        Raises:
            NoProgress: on all ranks, if one more would be in vain.
        """
        asked, attempts, problem = self.asked, None, None
        if self.ranks.is_zero:
            newest = CheckpointFolder(Path(asked.cfg.checkpointer.output_dir)).newest_name()
            now = Attempt(self.ranks.size, launcher.launch(), newest)
            try:
                attempts = Attempts(Path(asked["output_dir"]), now, asked["resume_from_checkpoint"])
            except NoProgress as error:
                problem = str(error)
        if problem := self.ranks.from_rank_zero(problem):
            raise NoProgress(problem)
        return attempts

    def _say_whether_steps_are_retried(self) -> None:
        if self._no_retry:
            log.info(f"A step that runs out of memory cannot be retried: {self._no_retry}.")

    def _close_planner(self) -> None:
        if self.planner is not None:
            self.planner.close()
            self.planner = None

    def load_rows(self) -> None:
        """Make the tokenizer and the data, before a model takes its time: what is missing is said at once.

        torchtune makes them later. So random numbers continue as if nothing had been made; data that has
        drawn some is made again, in its place.
        """
        self.watchdog.enter("loading the data", patience=None)
        generators = Generators(self.environment.device)
        rows = self.read_rows()
        self._rows = None if generators.have_moved() else rows
        generators.restore()

    def read_rows(self) -> LoadedRows:
        return load_rows(self.asked)

    def _loaded(self) -> LoadedRows:
        """The rows, which are loaded now if ``load_rows`` could not keep them."""
        self.watchdog.enter("loading the data", patience=None)
        loaded, self._rows = self._rows or self.read_rows(), None
        return loaded

    def prepare(
        self, model: Model, optimizers: Optimizers, objective: Objective, checkpoints: Checkpoints
    ) -> TrainingLoop | None:
        """Make the training loop of a model and its optimizer, with the sizes found if that is asked for.

        The search stands here: everything that it needs is there, and what depends on the batch size is not
        yet made. A subclass has other ``rows``, ``sizes`` and ``source``, in the same order.

        Returns:
            The loop, or None where only the search was asked for.
        """
        loaded = self._loaded()
        data = data_of(self.asked, loaded.tokenizer, loaded.training, self.kind.rows(), objective)
        self._note_what_it_is_made_of(model, data)
        order = self._order(data.dataset, model)
        step = self.train_step(model, optimizers, objective)
        rows = self.rows(loaded, data, order, model, step)
        batch = self.sizes(rows, Prober(step, self.ranks, self.watchdog, self.asked))
        self._close_planner()
        if self.settings.search_only:
            self._note(batch, batch.start)
            return None
        source = self.source(rows, batch, model)
        training = Training(
            asked=self.asked,
            watchdog=self.watchdog,
            stop=self.stop,
            progress=self.progress,
            kind=self.kind,
            logger=self.metrics,
            attempts=self.attempts,
            grow=self._grow,
            no_retry=self._no_retry,
        )
        self._loop = loop = training.loop(model, optimizers, step, batch, source, checkpoints)
        self._compare_batch(loop.adaptation.split, source.sample)
        self._note_what_is_resumed(source.epochs)
        self._note(batch, loop.adaptation.split)
        if rows.validation is not None:
            loop.validation = training.validation(loop, model, rows.validation, batch)
        return loop

    def rows(
        self, loaded: LoadedRows, data: Data, order: SampleOrder, model: Model, step: TrainStep
    ) -> RowsToTry:
        """What is trained on and validated on, once it is sure that there is something to learn."""
        require_something_to_learn(data, step)
        configured = self._configured(model.data_ranks)
        validation = self._validation_rows(loaded, step.objective)
        return RowsToTry(data, order, configured, self._lengths(data, self.asked), validation)

    def sizes(self, rows: RowsToTry, prober: Prober) -> DecidedBatch:
        """The sizes of micro-batches, as configured or found."""
        progress = self.progress
        if self.settings.searches:
            progress.sizes_for = prober.place()
        as_before = progress.sizes_for == progress.sized_for
        return decide_batch(prober, rows, progress.training, self.planner, as_before)

    def source(self, rows: RowsToTry, batch: DecidedBatch, model: Model) -> RowSource:
        """What gives each step its rows."""
        data, order = rows.data, rows.order
        loader = Loader(
            data.dataset,
            data.collate,
            order,
            model.data_rank,
            model.data_ranks,
            batch.micro_batches,
            self.settings.num_workers,
        )
        if self.settings.dropout == "sample":
            device, sequences = self.environment.device, data.rows.sequences
            keys = sample_dropout.DropoutKeys(model.module, self.progress.seed, sequences, device)
            loader.running = keys.running
        epochs = Epochs.of(order.per_epoch, batch.start, self.progress.max_steps_per_epoch)
        return RowSource(loader, epochs, data.rows.sample)

    def _order(self, dataset: Any, model: Model) -> SampleOrder:
        """The order of samples; a resumed run must have the same ones."""
        changed = self.progress.require_data(len(dataset))
        if changed is not None:
            self._say_change(changed)
        saved = self.progress.training
        ranks = saved.ranks_of_order if saved else model.data_ranks
        return self.progress.order_of(len(dataset), ranks)

    def _configured(self, ranks: int) -> Split:
        """The batch that the config asks for. A resumed run keeps its global batch on any number of ranks,
        unless the config has another batch than the run began with."""
        configured, saved = self.asked.batch(ranks), self.progress.training
        if saved is None or not saved.growth.keeps(configured):
            return configured
        # What a micro-batch of the config takes has fitted, so none is larger.
        return Split.of(saved.growth.first_global_batch, ranks, configured.micro_batch, 1)

    def _lengths(self, data: Data, asked: Asked) -> RowLengths:
        return RowLengths(
            data.dataset, asked.cfg, self.ranks, self.settings.cache, data.rows.length
        )

    def _validation_rows(self, loaded: LoadedRows, objective: Objective) -> ValidationRows | None:
        """What is validated on while training, if that is asked for."""
        if loaded.validation is None:
            return None
        validating = as_validated(self.asked)
        rows = recipe_kind(validating, self.environment).rows()
        data = data_of(validating, loaded.tokenizer, loaded.validation, rows, objective)
        size = validating["batch_size_val"]
        return ValidationRows(data, self._lengths(data, validating), size)

    def _note(self, batch: DecidedBatch, split: Split) -> None:
        """Put on record what was decided, and what training starts with."""
        if self.record is not None:
            step = self.progress.training.global_step if self.progress.training else 0
            self.record.decided(split, step, batch.report)

    def _note_what_it_is_made_of(self, model: Model, data: Data) -> None:
        if self.record is None:
            return
        cfg, parameters = self.asked.cfg, list(model.module.parameters())
        trained = sum(each.numel() for each in parameters if each.requires_grad)
        size = sum(each.numel() for each in parameters)
        sample = self.asked.kind.sample
        self.record.made_of = {
            "device": self.memory.name,
            "model": model_in_words(cfg, size, trained),
            "data": data_in_words(cfg, len(data.dataset), sample),
            "metrics": self.record.logger.destination,
        }

    def _note_what_is_resumed(self, epochs: Epochs) -> None:
        progress = self.progress
        if self.record is None:
            return
        step = progress.epochs_run * epochs.base_steps
        if progress.training is not None:
            step = progress.training.global_step
        events = Events.of(self.asked, self.ranks)
        if self.attempts is not None:
            self.attempts.begin_after(step)
            if facts := self.attempts.facts():
                events.attempted(step, self.attempts.text(), facts)
        if progress.source is None:
            return
        self.record.resumed(progress.source, step, progress.kept)
        events.resumed(step, progress.source, progress.changes)

    def _compare_batch(self, split: Split, sample: str) -> None:
        """Say if a resumed run goes on with another global batch, or on other ranks."""
        saved = self.progress.training
        if saved is None:
            return
        old, new = saved.growth.global_batch, split.global_batch
        before, now = len(saved.generators), self.ranks.size
        if old != new:
            self._say_change(change("global batch", old, new, f"config's: {split.text()}"))
        if self.ranks.is_zero and before != now:
            stays = (
                f" and the global batch of {counted(new, sample)} stay" if old == new else " stays"
            )
            log.info(
                f"{counted(now, 'rank')} instead of {before}: the order of samples{stays} ({split.text()})."
                + (" torch draws dropout anew." if self.settings.dropout == "torch" else "")
            )

    def _say_change(self, line: str) -> None:
        """Log what else is not as in the checkpoint that is resumed, and keep it for the record."""
        self.progress.changes.append(line)
        if self.ranks.is_zero:
            log.warning(line)

    def train_step(self, model: Model, optimizers: Optimizers, objective: Objective) -> TrainStep:
        """The step of this run, for its trials and for its training."""
        try:
            return self._train_step(model, optimizers, objective)
        except UsageError as unsupported:
            # Nobody has asked that steps of this model are retried.
            if self.settings.adapts or self.settings.on_out_of_memory is not None:
                raise
            self._no_retry = str(unsupported).rstrip(".")
            settings = replace(self.settings, on_out_of_memory="raise")
            self.asked = replace(self.asked, settings=settings)
            self._say_whether_steps_are_retried()
            return self._train_step(model, optimizers, objective)

    def _train_step(self, model: Model, optimizers: Optimizers, objective: Objective) -> TrainStep:
        clip, context = self.asked["clip_grad_norm"], self.environment.context
        needs_noise = getattr(self._grow, "needs_noise", False)
        return TrainStep(
            model=model.module,
            objective=objective,
            optimizers=optimizers.steppers,
            device=self.environment.device,
            memory=self.memory,
            ranks=self.ranks,
            options=StepOptions(
                survive=self.settings.survives,
                compiled=bool(self.asked["compile"]),
                activations=model.offloading,
                switches=build_switches(
                    self.asked, self.environment, model.module, objective, model.offloading
                ),
                clip_grad_norm=None if clip is None else float(clip),
                optimizer_in_backward=optimizers.in_backward,
                launched=self.watchdog.tick,
                measure_noise=self.settings.gradient_noise != "off" or needs_noise,
                context_group=context.group if context else None,
                stop_requested=lambda: self.stop.requested,
            ),
        )

    def close(self) -> None:
        self._leave_ranks()
        self.environment.tell_idle_ranks()
        self.stop.raise_if_stopped()

    def _leave_ranks(self) -> None:
        self.ranks.close()
        dist.destroy_process_group()
