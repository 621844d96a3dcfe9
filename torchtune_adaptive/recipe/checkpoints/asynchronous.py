"""Checkpoints that are written while training continues, in torch's distributed format."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig
from torch.distributed.checkpoint import FileSystemWriter, async_save
from torch.distributed.checkpoint.api import CheckpointException
from torchtune import training

from torchtune_adaptive.common import CheckpointError
from torchtune_adaptive.recipe import private
from torchtune_adaptive.recipe.checkpoints.all_or_none import (
    LONGEST_SAVE,
    AllOrNone,
    read_file,
    reason,
)
from torchtune_adaptive.recipe.checkpoints.folder import CheckpointFolder
from torchtune_adaptive.recipe.checkpoints.progress import Progress
from torchtune_adaptive.recipe.setup.model import Model
from torchtune_adaptive.recipe.setup.optimizer import Optimizers

log = logging.getLogger(__name__)

TRAINING_STATE = "training_state.pt"
"""The file beside torch's with what torchtune's format has no place for."""
_WRITERS = 4  # threads on each rank


class AsynchronousCheckpoints:
    """Writes a checkpoint in the background, one at a time, and loads one."""

    def __init__(self, cfg: DictConfig, folder: CheckpointFolder, all_or_none: AllOrNone) -> None:
        self._cfg = cfg
        self._folder = folder
        self._all = all_or_none
        # A save runs collectives in a thread; they must not meet those of training.
        self._group: dist.ProcessGroup | None = all_or_none.ranks.another_group(LONGEST_SAVE)
        self._running: Future[None] | None = None

    def begin(
        self,
        model: Model,
        optimizers: Optimizers,
        progress: Progress,
        name: str,
        facts: dict[str, Any],
        describe: Callable[[BaseException], str],
    ) -> None:
        """Copy everything, and begin to write it into the staged folder ``name``.

        ``facts`` are for its manifest; ``describe`` says why it could not be written.
        """
        # torch's own future is done before its callbacks are, and this one when all is published.
        running = self._running = Future()

        def publish(written: Future[Any]) -> None:
            """In a thread. That rank 0 is done means that all are: it writes the metadata last."""
            try:
                written.result()
                if self._all.ranks.is_zero:
                    self._folder.publish(name, facts)
                    log.info(f"Saved the checkpoint {self._folder.path / name}.")
            except BaseException as error:
                log.error(f"The checkpoint {name} could not be written: {reason(error)}.")
                problem = RuntimeError(describe(error))
                if self._all.ranks.is_zero:
                    self._folder.abandon(name)
                running.set_exception(problem)
            else:
                running.set_result(None)

        state = {
            **progress.of_torchtune(),
            training.MODEL_KEY: model.module.state_dict(),
            training.OPT_KEY: optimizers.saved.state_dict(),
        }
        writer = FileSystemWriter(
            self._folder.staging / name, thread_count=_WRITERS, sync_files=False
        )
        written = async_save(state, storage_writer=writer, process_group=self._group)
        written.add_done_callback(publish)  # type: ignore[union-attr]

    def finish(self) -> None:
        """Wait for what is being written: before the next save, and thereby before the run ends."""
        if self._running is not None:
            problem = self._running.exception()
            self._running = None
            self._all.raise_if_any(problem, str)

    def close(self) -> None:
        """Leave the group of its own, at the end of a run."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)

    def load(self, folder: Path, model: Model, optimizers: Optimizers) -> dict[str, Any]:
        """Load a checkpoint into the model and the optimizer; the recipe's state."""
        if optimizers.in_backward:
            # Only what the optimizer holds already is loaded. The client sees to that for one optimizer, and
            # forgets it for many, which would continue without their state.
            for optimizer in optimizers.steppers:
                private.initialize_state(optimizer)
        client = private.checkpoint_client(self._cfg, _FromFolder(folder, self._group))

        def read() -> dict[str, Any]:
            try:
                state = client.load_distributed_checkpoint(model.module, optimizers.saved)
            except CheckpointException as error:  # which is no Exception
                raise CheckpointError(f"{folder}: cannot be loaded ({reason(error)}).") from None
            return state | training_state_of(folder)

        return self._all.read(read)


def training_state_of(folder: Path) -> dict[str, Any]:
    """What a checkpoint has of ours; nothing if torchtune saved it."""
    file = folder / TRAINING_STATE
    return copy.deepcopy(read_file(str(file))) if file.exists() else {}


class _FromFolder(training.DistributedCheckpointer):
    """torchtune's reader of asynchronous checkpoints, for one that has been chosen."""

    def __init__(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        super().__init__(str(folder), str(folder.parent), group)
        self._folder = folder

    def load_checkpoint(
        self, state_dict: dict[str, Any] | None = None, checkpoint_path: str | None = None
    ) -> dict[str, Any]:
        return super().load_checkpoint(state_dict, checkpoint_path or str(self._folder))
