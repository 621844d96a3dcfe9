"""Checkpoints of transformers' trainers that are known to be whole, whenever the run was killed.

While a checkpoint is saved, its manifest is an empty file. When all processes have written their files, it
gets the size and checksum of each, before older checkpoints are removed. One without a manifest is the plain
trainer's, and is whole if it has the file that this writes last.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from torchtune_adaptive.common import CheckpointError, announce, durable, saving_through

log = logging.getLogger(__name__)

_UNFINISHED = "it was not saved to its end"


def chosen(trainer: Any, resume: Any) -> Any:
    """What to resume from, given ``resume_from_checkpoint``: where that is True, the newest whole checkpoint,
    and None if each was being saved when a run was killed."""
    from accelerate.utils import gather_object

    if not resume:
        return resume
    checks, folder, why = trainer.args.should_save, Path(trainer.args.output_dir), ""
    names = [path.name for path in folder.glob("checkpoint-*") if checks and resume is True]
    found = {name for name in gather_object(names) if name.partition("-")[2].isdigit()}
    newest_first = sorted(found, key=lambda name: -int(name.partition("-")[2]))
    for path in map(folder.joinpath, newest_first) if resume is True else [Path(resume)]:
        here = checks and (resume is True or path.exists())  # if not, the trainer says so
        whys = gather_object([_why_not_whole(path) if here else None])
        if not any(whys):
            return str(path)
        one = next(filter(None, whys))
        why = why if one == _UNFINISHED and resume is True else why or f"{path}: {one}"
        announce(log, f"{path.name} is left out: {one}", rank_zero=trainer.is_world_process_zero())
    if why:
        raise CheckpointError(
            f"resume_from_checkpoint: {why}. Name another, remove this one or, to take it as it is, "
            f"remove its {durable.MANIFEST} and name it."
        )
    return None if found else True  # of which the trainer says that there is none


def _why_not_whole(folder: Path) -> str | None:
    """Why a checkpoint is not whole; None if it is."""
    sealed = folder / durable.MANIFEST
    last = sealed if sealed.exists() else folder / "trainer_state.json"
    if not last.exists() or not last.stat().st_size:
        return _UNFINISHED
    try:
        if last is sealed:
            manifest = durable.read_manifest(folder)
            durable.check_sizes(folder, manifest)
            durable.check_contents(folder, manifest, [*manifest.files])
    except durable.Damaged as error:
        return str(error)
    return None


@contextmanager
def saving(trainer: Any, folder: Path) -> Iterator[None]:
    """A context in which a trainer saves a checkpoint in a folder."""
    state, saves = trainer.state, trainer.args.should_save
    write, wait, writer = (
        state.save_to_json,
        trainer.accelerator.wait_for_everyone,
        durable.Writer(),
    )
    callback_of(trainer).folder = folder

    def write_and_seal(path: str) -> None:
        write(path)  # the last file here; the trainer then uploads, and removes older checkpoints
        wait()
        durable.seal(folder, {"step": state.global_step}, writer.files(folder))
        for manifest in folder.parent.glob(f"checkpoint-*/{durable.MANIFEST}"):
            if not manifest.stat().st_size:  # of a run that was killed
                shutil.rmtree(manifest.parent, ignore_errors=True)

    if saves:
        durable.write_durably(folder / durable.MANIFEST, b"")
    with saving_through(writer.create), mock.patch.object(state, "save_to_json", write_and_seal):
        yield
    if not saves:
        wait()


def _seal_again(folder: Path) -> None:
    """Let the manifest of a checkpoint say what callbacks have made of its files."""
    sealed, manifest = (folder / durable.MANIFEST).stat().st_mtime_ns, durable.read_manifest(folder)
    paths = [folder / name for name in manifest.files]
    same = {path for path in paths if path.exists() and path.stat().st_mtime_ns < sealed}
    if len(same) < len(paths):
        known = {name: of for name, of in manifest.files.items() if folder / name in same}
        durable.seal(folder, manifest.facts, known)


def callback_of(trainer: Any) -> Any:
    """The callback that follows the checkpoints of a trainer, added if it is not there."""
    kind = _callback_class()
    if kind not in map(type, trainer.callback_handler.callbacks):
        trainer.add_callback(kind(trainer))
    return next(each for each in trainer.callback_handler.callbacks if isinstance(each, kind))


@cache
def _callback_class() -> type:
    from transformers import TrainerCallback
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

    class WholeCheckpoints(JITCheckpointCallback):
        """Lets ``enable_jit_checkpoint`` save behind a step or an evaluation, on all processes, as other
        checkpoints are. Before the optimizer's part, the random numbers of the step are drawn already."""

        on_pre_optimizer_step = on_step_begin = TrainerCallback.on_step_begin
        folder: Path
        stopped = False

        def __init__(self, trainer: Any) -> None:
            super().__init__()
            replaced = trainer.pop_callback(JITCheckpointCallback)
            self.trainer, self.jit_manager = trainer, replaced and replaced.jit_manager

        def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            self.stopped = False

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if args.save_strategy != "best" or not control.should_evaluate:  # else that may save
                self._stop_if_told(control)

        def on_evaluate(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if self.trainer.is_in_train and args.save_strategy != "best":
                self._stop_if_told(control)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            control.should_save &= not self.stopped  # it has been saved

        def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if args.should_save:
                _seal_again(self.folder)

        def _stop_if_told(self, control: Any) -> None:
            if self.jit_manager is None or self.stopped:
                return
            told = torch.tensor(float(self.jit_manager.is_checkpoint_requested))
            accelerator = self.trainer.accelerator
            self.stopped = bool(accelerator.reduce(told.to(accelerator.device)))
            if self.stopped:
                self.jit_manager.is_checkpoint_requested = False
                control.should_save = control.should_training_stop = True

    return WholeCheckpoints
