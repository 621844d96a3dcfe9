"""Loads what a run starts from, and saves checkpoints that are complete or do not exist.

The files are torchtune's own, so torchtune reads what these recipes save and the other way round. Where the
files are, and which checkpoint a run resumes from, is decided on rank 0.
"""

from __future__ import annotations

import copy
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import config, training
from torchtune.training import OptimizerInBackwardWrapper

from torchtune_adaptive.common import (
    CheckpointError,
    ConfigError,
    durable,
    human_bytes,
    saving_through,
)
from torchtune_adaptive.recipe import private
from torchtune_adaptive.recipe.checkpoints.all_or_none import (
    AllOrNone,
    read_file,
    reason,
)
from torchtune_adaptive.recipe.checkpoints.config_changes import (
    require_same_optimizer,
    training_config,
)
from torchtune_adaptive.recipe.checkpoints.folder import STATE, CheckpointFolder
from torchtune_adaptive.recipe.checkpoints.gathering import gathered_bytes
from torchtune_adaptive.recipe.checkpoints.how_to_save import saves_sharded
from torchtune_adaptive.recipe.checkpoints.progress import CONFIG_KEY, Progress
from torchtune_adaptive.recipe.checkpoints.resume_from import (
    Finished,
    Source,
    named_source,
    newest_source,
    say_what_is_replaced,
)
from torchtune_adaptive.recipe.checkpoints.sharded import (
    TRAINING_STATE,
    ShardedCheckpoints,
    damage_in_share,
    training_state_of,
)
from torchtune_adaptive.recipe.checkpoints.snapshots import Snapshots
from torchtune_adaptive.recipe.checkpoints.weight_files import WeightFiles
from torchtune_adaptive.recipe.checkpoints.weights import Weights
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.environment import Environment
from torchtune_adaptive.recipe.setup.model import Model
from torchtune_adaptive.recipe.setup.optimizer import Optimizers

log = logging.getLogger(__name__)

ID_KEY = "checkpoint_id"
"""The key in the recipe state of the checkpoint that it belongs to."""


class Checkpoints:
    """What a run starts from, and what it saves.

    Args:
        epochs: those of the run.
        weights: which of the model's weights are saved, and how.

    Raises:
        CheckpointError: there is nothing that could be resumed from, or nowhere to save.
    """

    def __init__(
        self, asked: Asked, environment: Environment, epochs: int, weights: Weights
    ) -> None:
        self._weights = weights
        self._asked = asked
        self._epochs = epochs
        self._environment = environment
        self._all = AllOrNone(environment.ranks)
        self._output_dir = Path(asked.cfg.checkpointer.output_dir)
        self._folder = CheckpointFolder(self._output_dir, asked.settings.keep_last_n_checkpoints)
        self._require_optimizer_that_can_be_saved()
        self._snapshots = Snapshots(asked, self._all, environment.device)
        self._begun: list[str] = []  # the id of the last one, which may still be being written
        chosen = self._undamaged_source()
        self.finished = chosen if isinstance(chosen, Finished) else None
        """The end of the run, if there is nothing left to train. Nothing can be loaded or saved then."""
        self._source = chosen if isinstance(chosen, Source) else None
        self._sharded: ShardedCheckpoints | None = None
        self._shards = False
        background = asked.settings.sharded_checkpoints == "background"
        self._in_background = background or asked["enable_async_checkpointing"]
        if self.finished is None:
            self._checkpointer = self._all.read(self.build_checkpointer)

    def load(self) -> dict[str, Any]:
        """The weights to start from, or None where ``resume`` loads them all; and, in a run that is resumed,
        the recipe's state."""
        return self._all.read(self._load)

    def load_frozen(self) -> list[dict[str, Any]]:
        """The weights of the models that are not trained."""

        def load(checkpointer: str) -> dict[str, Any]:
            built = config.instantiate(
                self._asked.cfg[checkpointer], should_load_recipe_state=False
            )
            return built.load_checkpoint()[training.MODEL_KEY]

        keys = [each.checkpointer for each in self._asked.kind.frozen]
        return [self._all.read(partial(load, key), key) for key in keys]

    def resume(
        self, model: Model, optimizers: Optimizers, progress: Progress, checkpoint: dict[str, Any]
    ) -> None:
        """Continue where the checkpoint was saved, if the run is resumed; and decide how it will save."""
        if self._source is not None and self._source.sharded is not None:
            checkpoint = self._load_sharded(model, optimizers, progress)
        sharded = self._asked.settings.sharded_checkpoints
        self._shards = saves_sharded(
            None if sharded is None else bool(sharded),
            self._in_background,
            gathered_bytes(model.module),
            self._output_dir,
            self._all,
        )
        if self._shards or self._in_background:
            self._writer()  # its ranks find each other in the launcher's store, which may be gone later
        self._snapshots.begin(model.module)
        if self._source is None:
            return
        progress.resume(checkpoint)
        progress.source = self._source.name
        if self._environment.ranks.is_zero:
            for line in progress.changes:
                log.warning(line)

    def save(
        self,
        model: Model,
        optimizers: Optimizers,
        progress: Progress,
        name: str,
        last: bool = False,
    ) -> None:
        """Save a checkpoint ``epoch_<name>``, and remove those that it supersedes.

        Args:
            last: whether the run ends then, so that nothing may be left to be written in the background.

        Raises:
            CheckpointError: on all ranks, if it could not be written; earlier ones are as they were.
        """
        if self._sharded is not None:
            self._sharded.finish()
        in_background = self._in_background and not last
        if (self._shards or in_background) and not self._state_stays_on_ranks:
            # torchtune finds those at the end of epochs by their name, and would take others for such.
            staged = f"dist_epoch_{name}" if name.isdecimal() else f"epoch_{name}"
            describe, facts = partial(self._unwritable, staged), self._facts(progress)
            self._begun = [facts["id"]]
            how = (self._writer(), describe, staged, facts)
            self._save_sharded(model, optimizers, progress, *how, in_background=in_background)
            if progress.is_unfinished:
                return
        if self._shards:
            self._save_weights(model, progress, name)
        else:
            self._save_gathered(model, optimizers, progress, name)

    def snapshot(self, model: Model, optimizers: Optimizers, progress: Progress, name: str) -> None:
        """Take a snapshot ``epoch_<name>`` while training goes on, if there is room for one."""
        since = [self._all.decide(self._folder.newest_id), *self._begun]
        facts = {**self._facts(progress), "since": since}

        def save(writer: ShardedCheckpoints, describe: Callable[[BaseException], str]) -> None:
            how = (writer, describe, f"epoch_{name}", facts)
            self._save_sharded(model, optimizers, progress, *how, in_background=True)

        self._snapshots.take(save)

    def save_weights(self, model: Model, progress: Progress) -> None:
        """Save the weights of a run that ended between its last checkpoint, a sharded one, and them."""
        if self._source is None or self._source.sharded is None:
            return
        self._save_weights(model, progress, f"{progress.epochs_run - 1}")

    def _save_gathered(
        self, model: Model, optimizers: Optimizers, progress: Progress, name: str
    ) -> None:
        """Save what torchtune reads, from rank 0."""
        started = time.perf_counter()
        log.info("Saving checkpoint. This may take some time. Retrieving full model state dict...")
        weights = self._gathered(model)
        facts = self._facts(progress)
        state: dict[str, Any] = {}
        if facts["resumable"]:
            state = {**progress.state_dict(), ID_KEY: facts["id"]}
            state[training.OPT_KEY] = self._optimizer_state(model, optimizers)

        def write() -> None:
            parts, lost = self._weights.parts(weights), ""
            try:
                self.write_files(name, parts, state, facts)
            except Exception as error:
                if progress.is_unfinished or not state:
                    raise
                lost = f"{reason(error)}{self._free()}"
            # Not while the error is handled: its frames hold the unfinished file open, which takes up room.
            if lost:
                # The weights are what the run was for; its state, twice as large, only continues it.
                self._folder.abandon(f"epoch_{name}")
                self.write_files(name, parts, {}, {**facts, "resumable": False})
                log.warning(
                    f"epoch_{name} is saved without its recipe state ({lost}): more epochs cannot continue "
                    "this run exactly."
                )
            seconds = time.perf_counter() - started
            log.info(f"Saved the checkpoint {self._output_dir}/epoch_{name} in {seconds:.2f} s.")

        self._write(write, f"epoch_{name}")

    def wait(self, seconds: float) -> bool:
        """Wait so long for what this rank writes in the background; name what is lost. Whether nothing is."""
        end = time.monotonic() + seconds
        if named := ", ".join(self.unfinished):
            log.warning(f"Waiting up to {seconds:g} s for {named}, which is being written.")
        try:
            return all(
                each.is_done_within(max(0.0, end - time.monotonic())) for each in self._writers
            )
        finally:
            if named := ", ".join(self.unfinished):
                log.error(f"{named} is lost: it was still being written when the run ended.")

    @property
    def unfinished(self) -> list[str]:
        """The paths of what is being written in the background."""
        return [path for each in self._writers for path in each.unfinished]

    @property
    def _writers(self) -> list[ShardedCheckpoints]:
        return [each for each in (self._sharded, self._snapshots.writer) if each is not None]

    def close(self) -> None:
        """Leave what groups it has of its own, at the end of a run, and remove its snapshots."""
        self._snapshots.close()
        if self._sharded is not None:
            self._sharded.close()

    # --- what a run starts from -----------------------------------------------------------------------

    def _undamaged_source(self) -> Source | Finished | None:
        """The files to resume from; None to start from the beginning. Of those that are sharded, each rank
        reads its share before."""
        ranks, damaged = self._environment.ranks, dict[Path, str]()
        if not self._asked["resume_from_checkpoint"]:
            self._all.decide(partial(say_what_is_replaced, self._folder))
            return None
        named, checkpoint = self._all.decide(self._what_is_there)
        if named is not None:
            return named
        since = self._snapshots.newest(checkpoint)
        choose = partial(newest_source, self._folder, self._asked.kind, self._epochs)
        while True:
            chosen = self._all.decide(partial(choose, damaged, since))
            if not isinstance(chosen, Source) or chosen.sharded is None:
                return chosen
            if self._snapshots.folder_of(chosen.checkpoint) is not None:
                return chosen  # and read already
            folder = Path(chosen.sharded)
            own = damage_in_share(folder, chosen.checkpoint, ranks.rank, ranks.size)
            damage = [each for each in self._all.gather(own) if each is not None]
            if not damage:
                return chosen
            damaged[folder] = damage[0]

    def _what_is_there(self) -> tuple[Source | None, str | None]:
        """The files that the config names; or else the id of the newest checkpoint."""
        if (named := named_source(self._asked.cfg, self._asked.kind)) is not None:
            return named, None
        self._folder.complete_interrupted()
        return None, self._folder.newest_id()

    def _sharded_source(self) -> Path | None:
        """The folder in which this rank reads the sharded checkpoint or snapshot to resume from, if any."""
        if self._source is None or self._source.sharded is None:
            return None
        return self._snapshots.folder_of(self._source.checkpoint) or Path(self._source.sharded)

    def build_checkpointer(self) -> Any:
        """torchtune's checkpointer: it reads the weights, and writes into the staging folder.

        It is never asked to find recipe state and adapters: it would look for them in its output folder.
        """
        weights = self._source.weights if self._source is not None else None
        return self._built(self._asked.cfg.checkpointer, self._folder.staging, weights)

    def _built(self, given: DictConfig, staging: Path, weights: Sequence[str] | None) -> Any:
        """The checkpointer of a block: it writes into ``staging`` and reads these files, if any."""
        # Where the rank does not save, a folder that exists, since torchtune makes it.
        saves = self._environment.ranks.is_zero
        changes: dict[str, Any] = {
            "output_dir": str(staging if saves else self._output_dir),
            "should_load_recipe_state": False,
        }
        changes |= {
            key: None for key in ("recipe_checkpoint", "adapter_checkpoint") if key in given
        }
        if weights is not None:
            changes["checkpoint_files"] = list(weights)
        checkpointer = config.instantiate(given, **changes)
        if saves:
            with suppress(OSError):  # torchtune has made the folder; nothing is being saved yet
                staging.rmdir()
        return checkpointer

    def _load(self) -> dict[str, Any]:
        source, folder = self._source, self._sharded_source()
        if folder is not None:
            self._require_same_optimizer(training_state_of(folder))
            if not self._asked.kind.adapters and private.knows_files(self._checkpointer):
                return {training.MODEL_KEY: None}  # all of it is in there
        loaded: dict[str, Any] = self._checkpointer.load_checkpoint()
        if source is None or folder is not None:
            return loaded
        if source.adapters is not None:
            loaded[training.ADAPTER_KEY] = read_file(source.adapters)
        if source.state is not None:
            state = read_file(source.state)
            if not isinstance(state, dict):
                raise CheckpointError(f"{source.state}: is not a recipe state. Name another file.")
            source.require_same(state.pop(ID_KEY, None))
            self._require_same_optimizer(state)
            of_optimizer = state.pop(training.OPT_KEY, None)
            loaded.update(copy.deepcopy(state))  # what a run keeps; the optimizer copies its state
            if of_optimizer is not None:
                loaded[training.OPT_KEY] = of_optimizer
        return loaded

    def _require_same_optimizer(self, state: dict[str, Any]) -> None:
        """Raise where the state of another optimizer would be loaded."""
        if saved := state.get(CONFIG_KEY):
            require_same_optimizer(
                saved["config"], training_config(self._asked.cfg, self._asked.kind)
            )

    def _load_sharded(
        self, model: Model, optimizers: Optimizers, progress: Progress
    ) -> dict[str, Any]:
        """Load a sharded checkpoint into the model and the optimizer; the recipe's state."""
        folder, of_torchtune = self._sharded_source(), progress.of_torchtune()
        assert folder is not None
        for optimizer in optimizers.steppers:  # only what it holds already is loaded
            private.initialize_state(optimizer)
        state = {**of_torchtune, **self._trained(model, optimizers)}
        self._writer().load(folder, state, self._snapshots.fetch)
        optimizers.saved.load_state_dict(state[training.OPT_KEY])
        numbers = {key: state[key] for key in of_torchtune}
        return numbers | self._all.read(partial(training_state_of, folder))

    # --- what is saved --------------------------------------------------------------------------------

    def _writer(self) -> ShardedCheckpoints:
        if self._sharded is None:
            self._sharded = ShardedCheckpoints(self._folder, self._all, self._environment.device)
        return self._sharded

    def _save_sharded(
        self,
        model: Model,
        optimizers: Optimizers,
        progress: Progress,
        writer: ShardedCheckpoints,
        describe: Callable[[BaseException], str],
        staged: str,
        facts: dict[str, Any],
        *,
        in_background: bool,
    ) -> None:
        def begin() -> None:
            file = writer.folder.begin(staged) / TRAINING_STATE
            with durable.Writer(flush=False).create(file) as opened:  # the seal flushes it
                torch.save(progress.training_state(), opened)

        self._write(begin, staged, writer.folder, describe)
        state = {**progress.of_torchtune(), **self._trained(model, optimizers)}
        writer.save(staged, state, facts, describe, in_background=in_background)

    def _trained(self, model: Model, optimizers: Optimizers) -> dict[str, Any]:
        """What training has changed, as each rank has it."""
        return {
            **self._weights.trained(model.module.state_dict()),
            training.OPT_KEY: optimizers.saved.state_dict(),
        }

    def _gathered(self, model: Model) -> dict[str, Any]:
        """The weights that the checkpointer expects, on rank 0."""
        environment = self._environment
        weights = training.gather_cpu_state_dict(
            model.module,
            environment.ranks.is_zero,
            device=environment.device,
            adapter_weights_only=self._weights.adapters_only,
        )
        if environment.device.type == "cpu":
            # These may be the parameters themselves, which merging adapters would change.
            weights = {key: weight.clone() for key, weight in weights.items()}
        return weights

    def _save_weights(self, model: Model, progress: Progress, name: str) -> None:
        """Save the weights of a sharded run in the usual format."""
        started, staged = time.perf_counter(), f"epoch_{name}"
        facts = {**self._facts(progress), "resumable": False}
        describe = partial(self._unwritable, staged)
        files = WeightFiles(self._all, self._checkpointer, self._weights, model.module.state_dict())
        self._all.decide(lambda: self._folder.staging.mkdir(parents=True, exist_ok=True))
        gathered = files.gather(self._environment.device, self._folder.staging, describe)
        if files.count == 1:
            parts = partial(self._weights.parts, gathered)
            self._write(lambda: self.write_files(name, parts(), {}, facts), staged)
        else:
            self._write_in_files(files, gathered, staged, facts)
        seconds = time.perf_counter() - started
        log.info(f"Saved the checkpoint {self._output_dir}/{staged} in {seconds:.2f} s.")

    def _write_in_files(
        self,
        files: WeightFiles,
        gathered: dict[str, torch.Tensor],
        staged: str,
        facts: dict[str, Any],
    ) -> None:
        self._write(lambda: self._folder.begin(staged), staged)
        folder = self._folder.staging / staged

        def abandon() -> None:
            if self._environment.ranks.is_zero:
                self._folder.abandon(staged)

        with self._all.undone_by(abandon):
            written = files.write(folder, gathered, partial(self._unwritable, staged))

        def publish() -> None:
            written.write_index(folder)
            self._folder.publish(staged, facts, written.files)

        self._write(publish, staged)

    def write_files(
        self, name: str, parts: dict[str, Any], state: dict[str, Any], facts: dict[str, Any]
    ) -> None:
        """Write and publish a checkpoint of what the checkpointer expects, on rank 0."""
        staged, writer = self._folder.begin(f"epoch_{name}"), self._folder.writer()
        with saving_through(writer.create):
            self._checkpointer.save_checkpoint(
                {**state, **parts},
                epoch=name,
                intermediate_checkpoint=bool(state),
                adapter_only=self._weights.adapters_only,
            )
        # torchtune 0.6.1 keeps the state there, its main branch with the weights.
        beside = self._folder.staging / "recipe_state"
        if state and not (staged / STATE).exists():
            (beside / STATE).rename(staged / STATE)
        shutil.rmtree(beside, ignore_errors=True)
        self._folder.publish(staged.name, facts, writer.files(staged))

    def _write(
        self,
        write: Callable[[], object],
        name: str,
        folder: CheckpointFolder | None = None,
        describe: Callable[[BaseException], str] | None = None,
    ) -> None:
        """Write on rank 0, while the others wait."""
        folder, describe = folder or self._folder, describe or partial(self._unwritable, name)
        problem, said = None, ""
        if self._environment.ranks.is_zero:
            try:
                write()
            except Exception as error:
                problem, said = error, describe(error)
                folder.abandon(name)
        self._all.raise_if_any(problem, lambda _: said)

    def _unwritable(self, name: str, error: BaseException) -> str:
        """The message about a checkpoint that is not there; asked for before its space is given back."""
        staged, why = self._folder.staging / name, f"{reason(error)}{self._free()}"
        newest = str(staged) if self._folder.is_complete(staged) else self._folder.newest_name()
        last = f"The last one is {newest}" if newest else "There is no earlier checkpoint"
        again = "resume with resume_from_checkpoint=True" if newest else "start again"
        return (
            f"The checkpoint {name} could not be written to {self._output_dir} ({why}). {last}: "
            f"make room, or make the folder writable, and {again}."
        )

    def _free(self) -> str:
        """The room where checkpoints are written. Some writers fail on a full disk without a word of it."""
        try:
            return f"; {human_bytes(shutil.disk_usage(self._output_dir).free)} free"
        except OSError:
            return ""

    def _facts(self, progress: Progress) -> dict[str, Any]:
        trained = progress.training
        return {
            "id": self._all.decide(lambda: uuid.uuid4().hex),
            "recipe": self._asked.kind.name,
            "resumable": progress.is_unfinished or not self._state_stays_on_ranks,
            "epochs_run": progress.epochs_run,
            "step": trained and trained.global_step,
            "samples": trained and trained.samples,
        }

    def _optimizer_state(self, model: Model, optimizers: Optimizers) -> dict[str, Any]:
        def full_state(optimizer: Any) -> dict[str, Any]:
            return training.get_full_optimizer_state_dict(
                model.module,
                optimizer,
                self._environment.ranks.is_zero,
                device=self._environment.device,
            )

        if isinstance(optimizers.saved, OptimizerInBackwardWrapper):
            # torch would make the state of those that have none, as their parameters had no gradient yet.
            in_use = {name: one for name, one in optimizers.saved.optim_map.items() if one.state}
            return {name: full_state(one) for name, one in in_use.items()}
        return full_state(optimizers.saved)

    @property
    def _state_stays_on_ranks(self) -> bool:
        """Whether the optimizer has state that no single rank can save."""
        optimizer = str(self._asked.cfg.optimizer._component_)
        return optimizer.startswith("torchao.optim.") and self._environment.ranks.size > 1

    def _require_optimizer_that_can_be_saved(self) -> None:
        asked = self._asked
        settings = asked.settings
        every = settings.save_every_n_steps or settings.snapshot_every_n_steps
        between_epochs = self._epochs > 1 or every is not None
        if self._state_stays_on_ranks and between_epochs:
            raise ConfigError(  # or the first checkpoint would end the run
                "optimizer",
                asked.cfg.optimizer._component_,
                "has quantized state, which torch cannot gather from several ranks for a checkpoint "
                "between epochs",
                "Use another optimizer, one rank, or epochs=1 without save_every_n_steps and "
                "snapshot_every_n_steps",
            )
