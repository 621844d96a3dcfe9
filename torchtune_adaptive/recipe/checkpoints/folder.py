"""The checkpoints in an output folder: which is the newest complete one, and which make way for it.

Each is a folder with torchtune's name (``epoch_0``; ``epoch_0_step_500`` mid-epoch; ``dist_epoch_0`` for a
sharded one at the end of an epoch) that holds everything that belongs together, the recipe state included. It
is written in ``.saving`` and published by one rename (see ``durable``).
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any

from torchtune_adaptive.common import (
    CheckpointError,
    Damaged,
    FolderInUse,
    FolderLock,
    Manifest,
    durable,
    not_essential,
)
from torchtune_adaptive.core import Ranks
from torchtune_adaptive.recipe.checkpoints.all_or_none import AllOrNone
from torchtune_adaptive.recipe.settings.asked import Asked

log = logging.getLogger(__name__)

STATE = "recipe_state.pt"
"""The recipe state in a checkpoint's folder; torchtune's ``recipe_state/recipe_state.pt`` leads there."""
TORCH_METADATA = ".metadata"
"""The file that torch writes last into a distributed checkpoint."""

OF_ALL = "of_all"
"""The fact with the names of the files that a snapshot has on all machines, where each has a part."""

_NAME = re.compile(r"(dist_)?epoch_(?P<epoch>\d+)(_step_(?P<step>\d+))?")
_STAGING = ".saving"
_TRASH = ".trash"
_RESUMABLE = 2
"""The checkpoints that stay resumable where no number is asked for: a disk may damage one of them."""
_STATELESS = "it is the end of a run, saved without its recipe state"
_STRIPPED = "its recipe state is missing: removed when a newer one was saved"

_NEEDED_FACTS: dict[str, tuple[type, ...]] = {
    "number": (int,),
    "id": (str,),
    "recipe": (str,),
    "resumable": (bool,),
    "epochs_run": (int,),
}
_OTHER_FACTS: dict[str, tuple[type, ...]] = {
    "step": (int, NoneType),
    "samples": (int, NoneType),
    "since": (list,),
    OF_ALL: (list,),
}


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint, by its manifest."""

    folder: Path
    manifest: Manifest | None
    """List of what it holds; None if torchtune saved it, and nothing of it can be verified."""
    is_verified: bool = False
    """Whether its files have been read already. They may be on other machines."""

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """The checkpoint in a folder.

        Raises:
            Damaged: its manifest does not say what a checkpoint's does.
        """
        manifest = durable.read_manifest(folder)
        for name, types in {**_NEEDED_FACTS, **_OTHER_FACTS}.items():
            if name in manifest.facts and type(manifest.facts[name]) not in types:
                said = f"{name} is {manifest.facts[name]!r}"
            elif name not in manifest.facts and name in _NEEDED_FACTS:
                said = f"{name} is missing"
            else:
                continue
            raise Damaged(f"its {durable.MANIFEST} is damaged: {said}")
        return cls(folder, manifest)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def facts(self) -> dict[str, Any]:
        return self.manifest.facts if self.manifest is not None else {}

    @property
    def number(self) -> int:
        """Checkpoints of an output folder are numbered in the order in which they were saved."""
        return int(self.facts.get("number", 0))

    @property
    def epochs_run(self) -> int:
        """The epochs that were done when it was saved."""
        return int(self.facts.get("epochs_run", 0))

    @property
    def is_sharded(self) -> bool:
        """Whether it is in torch's distributed format."""
        return self.manifest is None or TORCH_METADATA in self.manifest.files

    @property
    def place(self) -> tuple[str | None, str | None]:
        """The place in the run where it was saved: the epoch, and the step if that is in the middle of it."""
        parsed = _parsed(self.name)
        return parsed["epoch"], parsed["step"]

    @property
    def is_mid_epoch(self) -> bool:
        return self.place[1] is not None

    @property
    def is_resumable(self) -> bool:
        """Whether it was saved with what resuming needs, and that has not been removed since."""
        if self.is_sharded:
            return True
        return bool(self.facts.get("resumable")) and (self.folder / STATE).exists()


@dataclass(frozen=True)
class Since:
    """What snapshots there are since the newest checkpoint of a run."""

    newest: Checkpoint | None = None
    """The newest that is whole."""
    skipped: Sequence[str] = ()
    """Those that are newer, with the reason why they are not."""


NONE_SINCE = Since()


class CheckpointFolder:
    """The output folder of a run, as far as checkpoints are concerned. For rank 0 only.

    Args:
        keep: the number of newest checkpoints to keep. None: the newest two that can be resumed from, and
            the weights of every epoch.
        flush: whether they are to outlive the machine, and not only the processes of the run.
    """

    def __init__(self, path: Path, keep: int | None = None, *, flush: bool = True) -> None:
        self.path = path
        self.staging = path / _STAGING
        self._trash = self.staging / _TRASH
        self._link = path / "recipe_state" / STATE  # where torchtune looks for the newest one
        self._keep = keep
        self._flush = flush
        self._tidy = False
        self._newest_id: str | None = None

    def require_usable(self) -> None:
        """Raise unless checkpoints can be written here: before hours are spent on what could not be saved."""
        try:
            durable.require_writable(self.path)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be written to ({error.strerror}). Set output_dir to a folder that can."
            ) from None
        expected_folders = [self._link.parent, self.staging]
        expected_folders += [path for path in self.path.iterdir() if _NAME.fullmatch(path.name)]
        for path in expected_folders:
            if path.exists() and not path.is_dir():
                raise CheckpointError(
                    f"{path}: is a file where checkpoints need a folder. Move it away."
                )
        if self._link.is_dir():
            raise CheckpointError(
                f"{self._link}: is a folder where checkpoints need a file. Move it away."
            )

    # --- saving ---------------------------------------------------------------------------------------

    def begin(self, name: str) -> Path:
        """The empty place in which to write a checkpoint; it is no checkpoint until it is published."""
        if not self._tidy:
            self.complete_interrupted()
            shutil.rmtree(self.staging, ignore_errors=True)  # what other runs left unfinished
            self._tidy = True
        staged = self.staging / name
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        return staged

    def publish(self, name: str, facts: dict[str, Any], known: durable.Files | None = None) -> None:
        """Make what has been written a checkpoint, all at once; only then older ones make way.

        Args:
            known: the files that are on disk already; see ``durable.seal``.
        """
        numbered = {"number": 1 + self.newest_number(), **facts}
        durable.seal(self.staging / name, numbered, known, flush=self._flush)
        self._put_in_place(self.staging / name)
        self._newest_id = facts.get("id")
        try:
            self._remove_superseded()
        except OSError as error:
            log.warning(f"{self.path / name} is saved; what it supersedes stays: {error}.")
        shutil.rmtree(self._trash, ignore_errors=True)
        with suppress(OSError):  # unless another one is being written there
            self.staging.rmdir()

    def writer(self) -> durable.Writer:
        """What writes files of a checkpoint, and knows them for ``publish``; on any rank."""
        return durable.Writer(flush=self._flush)

    def abandon(self, name: str) -> None:
        """Give back the disk space of a checkpoint that could not be written.

        One that is complete, and could not be published only, stays: that is done when the run is resumed.
        """
        if not self.is_complete(self.staging / name):
            shutil.rmtree(self.staging / name, ignore_errors=True)
        shutil.rmtree(self.staging / "recipe_state", ignore_errors=True)
        with suppress(OSError):  # not if anything else is in it
            self.staging.rmdir()

    def _put_in_place(self, staged: Path) -> None:
        final = self.path / staged.name
        durable.publish(staged, final, self._trash, flush=self._flush)
        if (final / STATE).exists():
            with not_essential(f"{self._link}, a link for torchtune,"):
                durable.link(self._link, final / STATE)

    def _remove_superseded(self) -> None:
        gone, stripped = superseded(self._all(), self._keep)
        for one in gone:
            durable.remove(one.folder, self._trash)
        for one in stripped:
            if not one.folder.is_symlink():  # which is the checkpoint of another output folder
                (one.folder / STATE).unlink(missing_ok=True)
        if self._link.is_symlink() and not self._link.exists():
            self._link.unlink()

    def newest_id(self) -> str | None:
        """The id of the newest checkpoint, looked for once; None if there is none, or torchtune saved it."""
        if self._newest_id is None:
            newest = max(self._all(), key=lambda one: one.number, default=None)
            self._newest_id = newest.facts.get("id") if newest else None
        return self._newest_id

    def since(self, checkpoint: str | None, skipped: list[str]) -> list[Checkpoint]:
        """The snapshots in this folder that were taken since a checkpoint was saved, newest first.

        Args:
            checkpoint: its id; None where none was saved before them.
            skipped: a list that gets the names of those that are not whole, with the reason.
        """
        skipped += self.complete_interrupted()
        found = [each for each in self._all(skipped) if checkpoint in each.facts.get("since", [])]
        return sorted(found, key=lambda one: -one.number)

    def newest_number(self) -> int:
        """The number of the newest checkpoint; 0 if there is none."""
        return max((one.number for one in self._all()), default=0)

    def newest_name(self) -> str | None:
        """The newest checkpoint, for messages."""
        try:
            saved = self._all()
        except OSError:  # what reads this has something else to say
            return None
        newest = max(saved, key=lambda one: one.number, default=None)
        return str(newest.folder) if newest else None

    # --- finding --------------------------------------------------------------------------------------

    def newest(
        self,
        recipe: str,
        reads: re.Pattern[str] | None = None,
        epochs: int | None = None,
        damaged: Mapping[Path, str] = MappingProxyType({}),
        snapshots: Since = NONE_SINCE,
    ) -> tuple[Checkpoint | None, list[str]]:
        """The newest complete checkpoint, and those that are newer but not usable, with the reason.

        Args:
            recipe: the name of the kind of recipe that will resume.
            reads: the names of the files that will be read, besides the recipe state; None for all. Damage
                of others does not matter.
            epochs: the epochs that the run wants. A checkpoint that has them all needs no recipe state.
            damaged: the sharded checkpoints that ranks have found to be damaged, with the reason. Those are
                too large for this rank alone: it looks at the sizes of their files only.
            snapshots: those since the newest checkpoint here.

        Returns:
            No checkpoint if none has ever been saved here.

        Raises:
            CheckpointError: there are some, but none can be resumed from.
        """
        skipped = [*self.complete_interrupted(), *snapshots.skipped]
        unusable: list[str] = []
        saved = sorted(self._all(unusable), key=lambda one: -one.number)
        since = [snapshots.newest] if snapshots.newest is not None else []
        for checkpoint in since + saved:
            reason = damaged.get(checkpoint.folder) or _why_not(checkpoint, recipe, reads, epochs)
            if reason is None:
                return checkpoint, skipped + unusable
            if checkpoint in since:  # without any, training begins anew if nothing else was saved
                skipped.append(f"the snapshot {checkpoint.name} ({reason})")
            else:
                unusable.append(f"{checkpoint.name} ({reason})")
        if unusable:
            raise CheckpointError(
                f"{self.path}: none of the checkpoints can be resumed from: {'; '.join(unusable)}. Name "
                "files to resume from (checkpointer.checkpoint_files, checkpointer.recipe_checkpoint), set "
                "resume_from_checkpoint=False to start from the beginning, or train on from the weights of "
                "one (checkpointer.checkpoint_dir) with another output_dir."
            )
        return None, skipped

    def complete_interrupted(self) -> list[str]:
        """Publish what was sealed when its run was killed; the names of what was not finished."""
        unfinished = []
        for staged in sorted(self.staging.glob("*epoch_*")):
            if self.is_complete(staged):
                self._put_in_place(staged)
            else:
                unfinished.append(f"{staged.name} (its run ended while saving it)")
        return unfinished

    @staticmethod
    def is_complete(staged: Path) -> bool:
        """Whether a staged checkpoint only has to be published, as it is when the run is resumed."""
        try:
            manifest = Checkpoint.read(staged).manifest
            assert manifest is not None
            durable.check_sizes(staged, manifest)
        except Damaged:
            return False
        return True

    def _all(self, unusable: list[str] | None = None) -> list[Checkpoint]:
        """All published checkpoints, in no order; what only looks like one is listed with the reason."""
        found = []
        for folder in self.path.iterdir() if self.path.exists() else ():
            if not folder.is_dir() or not _NAME.fullmatch(folder.name):
                continue
            try:
                found.append(Checkpoint.read(folder))
            except Damaged as reason:
                has_manifest = (folder / durable.MANIFEST).exists()
                if not has_manifest and (folder / TORCH_METADATA).is_file():
                    # torchtune's, which is complete with this.
                    found.append(Checkpoint(folder, None))
                elif unusable is not None:
                    unusable.append(f"{folder.name} ({reason})")
        return found


def take_output_folders(
    asked: Asked,
    ranks: Ranks,
    until_exit: ExitStack,
    waits: Callable[[float], object] = lambda _: None,
) -> None:
    """Keep other runs out of the folders that this one writes to, until the context ends; for ``waits`` see
    ``FolderLock``.

    Raises:
        CheckpointError: on all ranks, if one cannot be written to, or another run is using it.
    """
    folders = {Path(asked["output_dir"]), Path(asked.cfg.checkpointer.output_dir)}

    def take() -> None:
        for folder in folders:
            CheckpointFolder(folder).require_usable()
        try:
            for folder in folders:
                until_exit.callback(FolderLock(folder, waits).release)
        except FolderInUse as error:
            raise CheckpointError(
                f"{error}. Wait until it has ended, or set output_dir to another folder."
            ) from None

    AllOrNone(ranks).decide(take)


def superseded(
    checkpoints: list[Checkpoint], keep: int | None
) -> tuple[list[Checkpoint], list[Checkpoint]]:
    """Which checkpoints are to be deleted, and which only lose their recipe state."""
    ours = [one for one in checkpoints if one.manifest is not None]
    newest_first = sorted(ours, key=lambda one: -one.number)
    if keep is not None:
        # At the end of a run, the weights and what continues it may be two folders.
        kept = list(dict.fromkeys(one.place for one in newest_first))[:keep]
        return [one for one in newest_first if one.place not in kept], []
    resumable = [one for one in newest_first if one.is_resumable]
    older = [one for one in newest_first[1:] if one not in resumable[:_RESUMABLE]]
    with_state = [one for one in older if one.is_resumable and not one.is_sharded]
    gone = [one for one in older if one.is_mid_epoch]
    return gone, [one for one in with_state if one not in gone]


def last_saved(output_dir: Path) -> str:
    """The folder of the newest checkpoint of a run, for messages."""
    return CheckpointFolder(output_dir).newest_name() or "none has been saved yet"


def checkpoint_of(file: Path) -> Checkpoint | None:
    """The checkpoint that a file belongs to, if it is one of ours."""
    folder = Path(os.path.realpath(file)).parent
    try:
        return Checkpoint.read(folder)
    except Damaged:
        return None


def _why_not(
    checkpoint: Checkpoint, recipe: str, reads: re.Pattern[str] | None, epochs: int | None
) -> str | None:
    """Why a checkpoint cannot be resumed from, or None."""
    manifest = checkpoint.manifest
    if manifest is None:
        return None
    saved_by = checkpoint.facts.get("recipe")
    if saved_by != recipe:
        return f"it was saved by the {saved_by} recipe"
    if checkpoint.is_verified:
        return None
    read = {*manifest.files}
    if not checkpoint.is_sharded:
        read = {name for name in read - {STATE} if reads is None or reads.fullmatch(name)}
        if checkpoint.is_resumable:
            read.add(STATE)
        elif epochs is None or checkpoint.epochs_run < epochs:
            return _STRIPPED if checkpoint.facts["resumable"] else _STATELESS
    if not read - {STATE}:
        return f"its {durable.MANIFEST} is damaged: it lists no weights"
    if unlisted := sorted(read - manifest.files.keys()):
        return f"its {durable.MANIFEST} is damaged: it does not list {unlisted[0]}"
    try:
        durable.check_sizes(checkpoint.folder, manifest, sorted(read))
        if not checkpoint.is_sharded:  # whose ranks read their share each
            durable.check_contents(checkpoint.folder, manifest, sorted(read))
    except Damaged as reason:
        return str(reason)
    return None


def _parsed(name: str) -> dict[str, str | None]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return match.groupdict()
