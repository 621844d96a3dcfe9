"""The files that a run resumes from: those that the config names, or the newest complete checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from omegaconf import DictConfig, ListConfig

from torchtune_adaptive.common import CheckpointError, Damaged, counted, durable
from torchtune_adaptive.recipe.checkpoints.folder import (
    NONE_SINCE,
    STATE,
    CheckpointFolder,
    Since,
    checkpoint_of,
)
from torchtune_adaptive.recipe.settings.kind_table import Kind

log = logging.getLogger(__name__)

ADAPTERS = "adapter_model.pt"

_WEIGHTS = re.compile(r"model(-.*)?\.(safetensors|bin|pt)")
"""Names of files; without a number where torchtune's main branch saves a single one."""
_ALL_WEIGHTS = re.compile(rf"(.*/)?{_WEIGHTS.pattern}")
"""The same, with those of a second model."""


@dataclass(frozen=True)
class Source:
    """The files to resume from.

    Args:
        weights: the model's, in place of those that the config names.
        adapters: the adapters, trained beside a frozen model.
        state: the recipe's state.
        sharded: the folder of a sharded checkpoint, which is all of it.
        checkpoint: the id that all of them share; None if none of them has one.
    """

    weights: tuple[str, ...] | None = None
    adapters: str | None = None
    state: str | None = None
    sharded: str | None = None
    checkpoint: str | None = None

    @property
    def name(self) -> str:
        """The folder of the checkpoint, as it is called in the output folder."""
        found = self.sharded or str(Path(self.state or "").resolve().parent)
        return Path(found).name

    def require_same(self, checkpoint: str | None) -> None:
        """Raise unless the recipe state, which says what it belongs to, belongs to the other files."""
        if checkpoint == self.checkpoint:
            return
        files = self.adapters or (self.weights[0] if self.weights else "the weights")
        if checkpoint is not None and self.checkpoint is not None:
            raise CheckpointError(
                f"{self.state}: belongs to another checkpoint than {files}. Name files of one checkpoint, or "
                "none: resume_from_checkpoint=True alone finds the newest complete one."
            )
        log.warning(f"{self.state} and {files}: cannot be verified to belong together.")


@dataclass(frozen=True)
class Finished:
    """The end of a run that is asked to resume, but has all its epochs."""

    checkpoint: str
    epochs: int

    def __str__(self) -> str:
        return (
            f"The run is finished, nothing to do: {self.checkpoint} has {counted(self.epochs, 'epoch')}. "
            "More epochs continue it."
        )


def newest_source(
    folder: CheckpointFolder,
    kind: Kind,
    epochs: int,
    damaged: Mapping[Path, str] = MappingProxyType({}),
    snapshots: Since = NONE_SINCE,
) -> Source | Finished | None:
    """The newest complete checkpoint in an output folder, or None if none has been saved.

    Args:
        damaged: sharded checkpoints that are not, with the reason.
        snapshots: those since the newest checkpoint.

    Raises:
        CheckpointError: none can be resumed from.
    """
    reads = re.compile(ADAPTERS) if kind.adapters else _ALL_WEIGHTS  # merged ones are not read
    found, skipped = folder.newest(kind.name, reads, epochs, damaged, snapshots)
    passed_over = f" Skipped: {'; '.join(skipped)}." if skipped else ""
    if found is None:
        log.warning(
            f"resume_from_checkpoint: there is no checkpoint in {folder.path} yet, so training starts from "
            f"the beginning.{passed_over}"
        )
        return None
    if found.epochs_run >= epochs and not found.is_sharded:  # or its weights are still to be saved
        return Finished(str(found.folder), found.epochs_run)
    step = found.facts.get("step")
    log.info(
        f"Resuming from {found.folder}{f' (step {step})' if step is not None else ''}.{passed_over}"
    )
    if found.is_sharded:
        return Source(sharded=str(found.folder), checkpoint=found.facts.get("id"))
    at = {name: str((found.folder / name).absolute()) for name in found.manifest.files}  # type: ignore[union-attr]
    state, checkpoint = at[STATE], found.facts["id"]
    if kind.adapters:
        return Source(adapters=at[ADAPTERS], state=state, checkpoint=checkpoint)
    weights = tuple(at[name] for name in sorted(at) if _WEIGHTS.fullmatch(name))
    return Source(weights=weights, state=state, checkpoint=checkpoint)


def weights_in(folder: Path) -> tuple[str, ...]:
    """The files of weights in a folder; none if it does not exist."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return tuple(str(path) for path in files if _WEIGHTS.fullmatch(path.name))


def say_what_is_replaced(folder: CheckpointFolder) -> None:
    """Warn where a run that begins anew finds checkpoints of an earlier one."""
    if newest := folder.newest_name():
        log.warning(
            f"{newest} is of an earlier run: this one starts from the beginning, and replaces its report and "
            "its checkpoints of the same names. Set resume_from_checkpoint=True to continue that run, or "
            "another output_dir to keep it."
        )


def named_source(cfg: DictConfig, kind: Kind) -> Source | None:
    """The files that a config names to resume from, or None if it leaves that open.

    As in torchtune, they are relative to the checkpointer's output folder. What is not named is taken from
    the same checkpoint.
    """
    given = cfg.checkpointer
    out = Path(given.output_dir).absolute()
    state, adapters = given.get("recipe_checkpoint"), given.get("adapter_checkpoint")
    weights = _named_weights(cfg, out) if not kind.adapters else ()
    if not (state or adapters or weights):
        return None
    if not kind.adapters and not weights:
        weights = tuple(str(out / name) for name in given.checkpoint_files)
    if kind.adapters and not adapters:
        beside = (out / state).resolve().parent / ADAPTERS
        if not beside.is_file():
            raise CheckpointError(
                "There are no adapter weights to resume from. Set checkpointer.adapter_checkpoint to the "
                f"{ADAPTERS} of the epoch to continue from."
            )
        adapters = str(beside)
    first = Path((adapters and str(out / adapters)) or weights[0])
    if state:
        state = str(out / state)
    elif (first.parent / STATE).is_file():
        state = str(first.parent / STATE)
    else:
        state = str(out / "recipe_state" / STATE)
    if kind.adapters:
        adapters = str(out / adapters)
        return Source(adapters=adapters, state=state, checkpoint=_verify((adapters,), state))
    return Source(weights=weights, state=state, checkpoint=_verify(weights, state))


def _named_weights(cfg: DictConfig, out: Path) -> tuple[str, ...]:
    """Weights in the output folder; those of a base model are in its own."""
    files = cfg.checkpointer.checkpoint_files
    if not isinstance(files, (list, ListConfig)):
        return ()
    base = Path(cfg.checkpointer.checkpoint_dir)
    named = [out / name for name in files]
    in_base = all((base / name).is_file() for name in files)
    return () if in_base and not any(path.is_file() for path in named) else tuple(map(str, named))


def _verify(weights: tuple[str, ...], state: str) -> str | None:
    """Raise unless all files are what was saved, as far as that is known; the weights' checkpoint.

    Raises:
        CheckpointError: naming the file.
    """
    ids = set()
    for file in [*weights, state]:
        path = Path(file)
        if not path.is_file():
            raise CheckpointError(
                f"{path}: there is no such file to resume from. Name one in checkpointer.output_dir, or "
                "none: resume_from_checkpoint=True alone finds the newest complete checkpoint."
            )
        owner = checkpoint_of(path)
        name = path.resolve().name
        if owner is None or owner.manifest is None or name not in owner.manifest.files:
            if path.stat().st_size == 0:
                raise CheckpointError(f"{path}: is empty. Resume from another checkpoint.")
            continue
        try:
            durable.check_sizes(owner.folder, owner.manifest, [name])
            durable.check_contents(owner.folder, owner.manifest, [name])
        except Damaged as reason:
            raise CheckpointError(
                f"{owner.folder}: {reason}. Resume from another checkpoint."
            ) from None
        if file != state:
            ids.add(str(owner.facts["id"]))
    if len(ids) > 1:
        raise CheckpointError(
            "checkpointer.checkpoint_files: the files belong to different checkpoints. Name files of one."
        )
    return ids.pop() if ids else None
