"""Snapshots: sharded checkpoints in memory or on a local disk, from which a restart goes on.

They outlive the processes of a run and, of several machines, the loss of one. What they are of is in the
output folder: a run that begins anew there, or in a new folder of that name, finds none.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.common import (
    CheckpointError,
    durable,
    human_bytes,
    launcher,
    make_own_folder,
    remove_unused,
    use_folder,
)
from torchtune_adaptive.core import Ranks
from torchtune_adaptive.recipe.checkpoints.all_or_none import AllOrNone, reason
from torchtune_adaptive.recipe.checkpoints.folder import NONE_SINCE, CheckpointFolder, Since
from torchtune_adaptive.recipe.checkpoints.gathering import MOMENTS
from torchtune_adaptive.recipe.checkpoints.neighbours import Neighbours
from torchtune_adaptive.recipe.checkpoints.places import Places
from torchtune_adaptive.recipe.checkpoints.sharded import ShardedCheckpoints
from torchtune_adaptive.recipe.checkpoints.whole import WholeSnapshots
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.cgroups import available_memory

log = logging.getLogger(__name__)

IN_MEMORY = Path("/dev/shm")
NAME = ".snapshots"
"""The file in the output folder with the name that its snapshots have."""
_ID = re.compile("[0-9a-f]{32}")
_KEPT = 2
_LONGEST_WAIT = 60.0
"""Seconds that training waits for the snapshot before, once it is time for another."""
_MEMORY_BACKED = ("tmpfs", "ramfs")


class Snapshots:
    """The snapshots of a run: where they are, and when none can be taken. All ranks call all of it.

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
        self._place = self._root(asked.settings.snapshot_folder)
        name, is_new = everyone.decide(self._name)
        wanted = (self._takes and not self._only_looks) or not is_new
        self._used: int | None = None
        self._impossible = self._why_not_ours(name, wanted)
        self.folder = CheckpointFolder(self._place / name, _KEPT, flush=False)
        self._places = self._found_places(wanted)
        self._whole = WholeSnapshots(self.folder, self._places, everyone)
        self.writer: ShardedCheckpoints | None = None
        """What writes them, once one is taken."""
        self._neighbours: Neighbours | None = None
        self._sizes = [0] * everyone.ranks.size
        self._has_copies = self._places.are_several
        self._has_said: set[str] = set()
        self._is_late = False

    def newest(self, checkpoint: str | None) -> Since:
        """The newest whole snapshot that was taken since a checkpoint."""
        return NONE_SINCE if self._impossible else self._whole.newest(checkpoint)

    def folder_of(self, checkpoint: str | None) -> Path | None:
        """The folder in which this rank reads the newest snapshot, if it has this id."""
        return self._whole.folder_of(checkpoint)

    def fetch(self, names: Collection[str], ranks: Ranks) -> None:
        """Get files of the newest snapshot that this rank reads, and that are on other machines."""
        self._whole.fetch(names, ranks)

    def begin(self, model: nn.Module) -> None:
        """Say before training if none can be taken, or if they have no copies."""
        self._whole.close()
        if not self._takes:
            return
        trained = [each for each in model.parameters() if each.requires_grad]
        own = sum(
            each.to_local().nbytes if isinstance(each, DTensor) else each.nbytes for each in trained
        )
        self._sizes = [(1 + MOMENTS) * each for each in self._all.gather(own)]
        if self._has_copies and (lack := self._lack()) is not None:
            self._has_copies = False
            if self._lack() is None:
                self._say(
                    f"Snapshots have no copies on other machines: with them, {lack}. If a machine is lost, "
                    "the run goes on from the last checkpoint.",
                    of="copies",
                )
        self._is_possible()

    def take(
        self, save: Callable[[ShardedCheckpoints, Callable[[BaseException], str]], None]
    ) -> None:
        """Take a snapshot while training goes on, if that is possible; otherwise say so once.

        Args:
            save: function that begins to save with a writer; it is given what describes its failures.
        """
        if not (self._is_ready() and self._is_possible()):
            return
        if self._places.are_several and self._neighbours is None:
            self._neighbours = Neighbours(
                self._places,
                self.folder,
                self._all,
                self._has_copies,
                partial(self._say, of="copies"),
            )
        if self._neighbours is not None:
            self._neighbours.connect()
        if self.writer is None:
            self.writer = ShardedCheckpoints(
                self.folder,
                self._all,
                self._device,
                self._say,
                what="snapshot",
                neighbours=self._neighbours,
            )
        try:
            save(self.writer, self._unwritable)
        except CheckpointError as error:
            self._say(str(error))

    def close(self) -> None:
        """Remove them: the run has ended, and what continues it is in the output folder."""
        self._finish()
        if self.writer is not None:
            self.writer.close()
        if self._neighbours is not None:
            self._neighbours.close()
        if self._only_looks:
            return
        if self._places.is_leader and self._impossible is None:
            shutil.rmtree(self.folder.path, ignore_errors=True)
            with suppress(OSError):  # others have some there
                self._place.rmdir()
        if self._used is not None:
            os.close(self._used)
            self._used = None
        if self._all.ranks.is_zero:
            (self._output_dir / NAME).unlink(missing_ok=True)

    def _is_ready(self) -> bool:
        """Whether the one before is written, or has failed. If not, the ranks that are late are named."""
        if self.writer is None or not self.writer.is_writing:
            return True
        is_done = self.writer.is_done_within(0.0 if self._is_late else _LONGEST_WAIT)
        copies = self._neighbours is not None and self._neighbours.is_copying
        late = {
            rank: copies
            for rank, (is_done, copies) in enumerate(self._all.gather((is_done, copies)))
            if not is_done
        }
        self._is_late = bool(late)
        if late:
            ranks = [rank for rank, copies in late.items() if copies] or [*late]
            self._say(
                f"Snapshots are left out until the one before is written, which takes more than "
                f"{_LONGEST_WAIT:g} s: {self._places.named(ranks)} still writes. Training goes on."
            )
            return False
        self._finish()
        return True

    def _finish(self) -> None:
        """Wait for the one that is being written. After a failure, the next one has a writer of its own, as
        ranks may have left this one's group."""
        if self.writer is None or not self.writer.is_writing:
            return
        try:
            self.writer.finish()
            self._has_said.discard("")
        except CheckpointError:  # said already
            self.writer.close()
            self.writer = None

    def _is_possible(self) -> bool:
        """Whether a snapshot can be taken, on all ranks; if none can, rank 0 says so."""
        problem = self._impossible or self._lack()
        if problem is not None:
            self._say(
                f"No snapshots are taken in {self._place}: {problem}. Set {BLOCK}.snapshot_folder to a "
                "folder with room on a local disk, or on several machines to one that all share."
            )
        return problem is None

    def _lack(self) -> str | None:
        """What is missing for a snapshot on one of the machines, if anything is."""
        look = self._look() if self._places.is_leader else None
        for rank, problem in enumerate(self._all.gather(look)):
            if problem is not None:
                on = f"on {self._places.hosts[rank]}, " if self._places.are_several else ""
                return f"{on}{problem}"
        return None

    def _found_places(self, wanted: bool) -> Places:
        """Which ranks share the folder of snapshots, where there are any to take or to find."""
        if wanted and not self._impossible and launcher.size() > launcher.local_size():
            try:
                return Places.found(self.folder.path, self._all)
            except CheckpointError as error:
                self._impossible = f"not all machines can write there ({error})"
        return Places.one(self._all.ranks)

    def _why_not_ours(self, name: str, wanted: bool) -> str | None:
        """Why the folder of snapshots cannot be used on a machine, on all ranks; None if it can be. A rank of
        each machine marks it as used, and removes what runs have left beside it that are gone."""
        problem = None
        try:
            if launcher.local_rank() == 0 and (wanted or os.path.lexists(self._place)):
                self._place.parent.mkdir(parents=True, exist_ok=True)
                make_own_folder(self._place)
                if wanted:
                    make_own_folder(self._place / name)
                    self._used = use_folder(self._place / name)
                for each in self._place.iterdir() if not self._only_looks else ():
                    if each.name != name:
                        remove_unused(each)
        except OSError as error:
            problem = reason(error)
        return next(filter(None, self._all.gather(problem)), None)

    # --- on one rank, of all or of a machine ----------------------------------------------------------

    def _root(self, folder: str | None) -> Path:
        """The folder of all snapshots of an output folder; the same whenever a run is started there."""
        output_dir = self._output_dir.resolve()
        parent = Path(folder) if folder else IN_MEMORY if IN_MEMORY.is_dir() else output_dir
        digest = hashlib.sha256(str(output_dir).encode()).hexdigest()[:12]
        return parent.absolute() / f"torchtune_adaptive_{os.geteuid()}_{digest}"

    def _name(self) -> tuple[str, bool]:
        """The name that the output folder has for its snapshots, and whether it is a new one, as where there
        is none to resume."""
        file, new = self._output_dir / NAME, uuid.uuid4().hex
        if self._resumes and file.is_file() and _ID.fullmatch(name := file.read_text()):
            return name, False
        if not self._only_looks:
            file.unlink(missing_ok=True)
            if self._takes:
                durable.write_durably(file, new.encode())
        return new, True

    def _look(self) -> str | None:
        """Why no snapshot can be taken on this machine now, or None."""
        places = self._places
        here = {*places.beside(places.rank)}
        own = sum(self._sizes[rank] for rank in here)
        copied = 0
        if self._has_copies:
            copied = sum(
                size for rank, size in enumerate(self._sizes) if places.neighbours[rank] in here
            )
        machines = 1 if places.are_several else launcher.size() // launcher.local_size()
        try:
            files = (each.stat() for each in self.folder.path.rglob("*") if each.is_file())
            return lack_of_room(
                own + copied,
                own // machines,
                held=sum(each.st_size for each in files),
                staged=self.writer is not None and self.writer.has_copy,
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

    def _say(self, line: str, of: str = "") -> None:
        """Say something once, until a snapshot has succeeded; of copies, once."""
        if of not in self._has_said:
            log.log(logging.WARNING if self._all.ranks.is_zero else logging.DEBUG, line)
        self._has_said.add(of)


def lack_of_room(
    size: int,
    from_device: int,
    *,
    held: int,
    staged: bool,
    in_folder: int,
    in_memory: int,
    memory_backed: bool,
) -> str | None:
    """What is missing on a machine for snapshots of ``size`` bytes there, of which the newest two and a third
    one, which is being written, are there at once; None if nothing is.

    Args:
        from_device: bytes of host memory that they are copied into first.
        held: bytes that earlier ones have already.
        staged: whether there is memory for that copy already.
        in_folder: bytes that are free where they are written.
        in_memory: bytes of memory that the machine has left.
        memory_backed: whether what is written takes memory as well.
    """
    files = max(0, (_KEPT + 1) * size - held)
    if files > in_folder:
        return f"they take {human_bytes(files)} more, and {human_bytes(in_folder)} are free"
    memory = (0 if staged else from_device) + (files if memory_backed else 0)
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
