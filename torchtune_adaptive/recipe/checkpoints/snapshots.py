"""Snapshots: sharded checkpoints in memory or on a local disk, from which a restart on this machine goes on.

They outlive the processes of a run, not its machine. What they are of is in the output folder: a run that
begins anew there, or in a new folder of that name, finds none.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.common import CheckpointError, durable, human_bytes, launcher
from torchtune_adaptive.recipe.checkpoints.all_or_none import AllOrNone, reason
from torchtune_adaptive.recipe.checkpoints.folder import CheckpointFolder
from torchtune_adaptive.recipe.checkpoints.gathering import MOMENTS
from torchtune_adaptive.recipe.checkpoints.how_to_save import is_shared
from torchtune_adaptive.recipe.checkpoints.sharded import ShardedCheckpoints
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.cgroups import available_memory

log = logging.getLogger(__name__)

IN_MEMORY = Path("/dev/shm")
NAME = ".snapshots"
"""The file in the output folder with the name that its snapshots have."""
_KEPT = 2
_MEMORY_BACKED = ("tmpfs", "ramfs")


class Snapshots:
    """The snapshots of a run: where they are, and when none can be taken.

    Args:
        device: the device of what is saved.
    """

    def __init__(self, asked: Asked, everyone: AllOrNone, device: torch.device) -> None:
        self._all = everyone
        self._device = device
        self._output_dir = Path(asked.cfg.checkpointer.output_dir)
        self._resumes = bool(asked["resume_from_checkpoint"])
        self._takes = asked.settings.snapshot_every_n_steps is not None
        self._only_looks = asked.settings.search_only
        self._place = self._root(asked.settings.snapshot_folder)  # rank 0's counts
        name = everyone.decide(self._name)
        self.folder = CheckpointFolder(self._place / name, _KEPT, flush=False)
        self._writer: ShardedCheckpoints | None = None
        self._size = 0
        self._impossible: str | None = None
        self._has_said = False

    def begin(self, model: nn.Module) -> None:
        """Say before training if none can be taken."""
        if not self._takes:
            return
        trained = [each for each in model.parameters() if each.requires_grad]
        own = sum(
            each.to_local().nbytes if isinstance(each, DTensor) else each.nbytes for each in trained
        )
        self._size = (1 + MOMENTS) * sum(self._all.gather(own))
        several = launcher.size() > launcher.local_size()
        if self._is_possible() and several and not is_shared(self.folder.path, self._all):
            self._impossible = "each machine has one of its own, and would have a part only"
            self._is_possible()

    def take(
        self, save: Callable[[ShardedCheckpoints, Callable[[BaseException], str]], None]
    ) -> None:
        """Take a snapshot while training goes on, if that is possible; otherwise say so once.

        Args:
            save: function that begins to save with a writer; it is given what describes its failures.
        """
        self._finish()
        if not self._is_possible():
            return
        if self._writer is None:
            self._writer = ShardedCheckpoints(
                self.folder, self._all, self._device, self._say, what="snapshot"
            )
        try:
            save(self._writer, self._unwritable)
        except CheckpointError as error:
            self._say(str(error))

    def close(self) -> None:
        """Remove them: the run has ended, and what continues it is in the output folder."""
        self._finish()
        if self._writer is not None:
            self._writer.close()
        if self._all.ranks.is_zero and not self._only_looks:
            self._remove()

    def _finish(self) -> None:
        """Wait for the one that is being written. After a failure, the next one has a writer of its own, as
        ranks may have left this one's group."""
        if self._writer is None or not self._writer.is_writing:
            return
        try:
            self._writer.finish()
            self._has_said = False
        except CheckpointError:  # said already
            self._writer.close()
            self._writer = None

    def _is_possible(self) -> bool:
        """Whether a snapshot can be taken, on all ranks; if none can, rank 0 says so."""
        problem = self._impossible or self._all.decide(self._look)
        if problem is not None:
            self._say(
                f"No snapshots are taken in {self._place}: {problem}. Set {BLOCK}.snapshot_folder to a "
                "folder with room on a local disk, or on several machines to one that all share."
            )
        return problem is None

    # --- on rank 0 ------------------------------------------------------------------------------------

    def _root(self, folder: str | None) -> Path:
        """The folder of all snapshots of an output folder; the same whenever a run is started there."""
        output_dir = self._output_dir.resolve()
        parent = Path(folder) if folder else IN_MEMORY if IN_MEMORY.is_dir() else output_dir
        digest = hashlib.sha256(str(output_dir).encode()).hexdigest()[:12]
        return parent.absolute() / f"torchtune_adaptive_{digest}"

    def _name(self) -> str:
        """The name that the output folder has for its snapshots; a new one where there is none to resume."""
        file, new = self._output_dir / NAME, uuid.uuid4().hex
        if self._resumes and file.is_file():
            return file.read_text()
        if not self._only_looks:
            self._remove()
            if self._takes:
                durable.write_durably(file, new.encode())
        return new

    def _remove(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        (self._output_dir / NAME).unlink(missing_ok=True)

    def _look(self) -> str | None:
        """Why no snapshot can be taken now, or None."""
        try:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            files = (each.stat() for each in self._place.rglob("*") if each.is_file())
            return lack_of_room(
                self._size,
                launcher.size() // launcher.local_size(),
                held=sum(each.st_size for each in files),
                copied=self._writer is not None and self._writer.has_copy,
                in_folder=shutil.disk_usage(self._place).free,
                in_memory=available_memory(),
                memory_backed=_is_memory_backed(self._place),
            )
        except OSError as error:
            return f"it cannot be written to ({reason(error)})"

    def _unwritable(self, error: BaseException) -> str:
        return (
            f"A snapshot could not be written to {self._place} ({reason(error)}). Training goes on, and the "
            "next one is tried."
        )

    def _say(self, line: str) -> None:
        if not self._has_said:
            log.log(logging.WARNING if self._all.ranks.is_zero else logging.DEBUG, line)
        self._has_said = True


def lack_of_room(
    size: int,
    machines: int,
    *,
    held: int,
    copied: bool,
    in_folder: int,
    in_memory: int,
    memory_backed: bool,
) -> str | None:
    """What is missing for snapshots of ``size`` bytes, of which the newest two and a third one, which is
    being written, are there at once, and a copy of what is written; None if nothing is.

    Args:
        held: bytes that earlier ones have already.
        copied: whether there is memory for the copy already.
        in_folder: bytes that are free where they are written.
        in_memory: bytes of memory that a machine has left.
        memory_backed: whether what is written takes memory as well.
    """
    files = max(0, (_KEPT + 1) * size - held)
    if files > in_folder:
        return f"they take {human_bytes(files)} more, and {human_bytes(in_folder)} are free"
    memory = (0 if copied else size) // machines + (files if memory_backed else 0)
    if memory > in_memory:
        return (
            f"they take {human_bytes(memory)} more of the host's memory, of which {human_bytes(in_memory)} "
            "are free"
        )
    return None


def _is_memory_backed(folder: Path) -> bool:
    mounts = [
        each for each in psutil.disk_partitions(all=True) if folder.is_relative_to(each.mountpoint)
    ]
    nearest = max(mounts, key=lambda each: len(each.mountpoint), default=None)
    return nearest is not None and nearest.fstype in _MEMORY_BACKED
