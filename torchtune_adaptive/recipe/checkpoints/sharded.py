"""Checkpoints in torch's distributed format: each rank writes its part, at once or while training continues.

Nothing is gathered, and a run on any number of ranks, with any mesh, reads what it needs of them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemWriter,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from torchtune_adaptive.common import CheckpointError, durable
from torchtune_adaptive.core import Ranks
from torchtune_adaptive.recipe.checkpoints.all_or_none import (
    LONGEST_SAVE,
    AllOrNone,
    read_file,
    reason,
)
from torchtune_adaptive.recipe.checkpoints.folder import (
    TORCH_METADATA,
    Checkpoint,
    CheckpointFolder,
)
from torchtune_adaptive.recipe.checkpoints.neighbours import Neighbours
from torchtune_adaptive.recipe.checkpoints.torch_reader import Planner, Reader

log = logging.getLogger(__name__)

TRAINING_STATE = "training_state.pt"
"""The file beside torch's with what torchtune's format has no place for."""
_WRITERS = 4  # threads on each rank, each of which writes a file
_planners = count()
Fetch = Callable[[set[str], Ranks], None]


class ShardedCheckpoints:
    """Writes checkpoints, one at a time, and loads one.

    Args:
        device: the device of what is saved.
        failed: function that is told, while training continues, why one could not be written.
        what: what they are called in the log.
        neighbours: what completes them where each machine has a folder of its own.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        all_or_none: AllOrNone,
        device: torch.device,
        failed: Callable[[str], None] = log.error,
        what: str = "checkpoint",
        neighbours: Neighbours | None = None,
    ) -> None:
        self.folder = folder
        self._what = what
        self._failed = failed
        self._all = all_or_none
        self._device = device
        self._neighbours = neighbours
        self._publishes = (
            all_or_none.ranks.is_zero if neighbours is None else neighbours.places.is_leader
        )
        # A thread in the background runs collectives, which must not meet those of training.
        self._in_thread = AllOrNone(all_or_none.ranks.in_a_thread(LONGEST_SAVE))
        self._stager: DefaultStager | None = None
        self._running: Future[None] | None = None
        self._name = ""  # of what it writes
        # Rank 0 plans once who writes what, as that may take a minute. torch keeps plans by the name of the
        # planner's class, and other runs in this process have others.
        self._planner = type(f"Planner{next(_planners)}", (DefaultSavePlanner,), {})

    def save(
        self,
        name: str,
        state: dict[str, Any],
        facts: dict[str, Any],
        describe: Callable[[BaseException], str],
        *,
        in_background: bool,
    ) -> None:
        """Write a checkpoint into the staged folder ``name``, and publish it.

        Args:
            facts: what its manifest says of it.
            describe: function that says why it could not be written.
            in_background: whether to return as soon as there is a copy of ``state`` in host memory.

        Raises:
            CheckpointError: on all ranks, if it could not be written; in the background, ``finish`` does.
        """
        if not in_background:
            self._write(name, state, facts, describe)
            return
        with (
            self._all.undone_by(partial(self._abandon, name)),
            self._all.together(describe, Exception),
        ):
            staged = self._copy(state)
        self._name, self._running = name, Future()
        arguments = (self._running, name, staged, facts, describe)
        # Not one that Python waits for at its end, where the next rank or the disk may never answer.
        Thread(target=self._write_and_log, args=arguments, name="checkpoints", daemon=True).start()

    @property
    def is_writing(self) -> bool:
        """Whether there is something to ``finish``."""
        return self._running is not None

    def is_done_within(self, seconds: float | None) -> bool:
        """Wait so long for what is being written; whether there is nothing to wait for any more."""
        return self._running is None or not wait([self._running], seconds).not_done

    @property
    def unfinished(self) -> list[str]:
        """The path of what is being written, if anything is."""
        return [] if self.is_done_within(0.0) else [str(self.folder.path / self._name)]

    @property
    def has_copy(self) -> bool:
        """Whether it has the memory for a copy of what is saved."""
        return self._stager is not None

    def finish(self) -> None:
        """Wait for what is being written: before the next save, and before the run ends."""
        if self._running is not None:
            problem, self._running = self._running.exception(), None
            self._all.raise_if_any(problem, str)

    def close(self) -> None:
        """Leave the group of its own once nothing is being written, at the end of a run."""
        self.is_done_within(None)
        if self._stager is not None:
            self._stager.close()
        self._in_thread.ranks.close()

    def load(self, folder: Path, state: dict[str, Any], fetch: Fetch | None = None) -> None:
        """Load a checkpoint into the tensors of ``state``, and replace its other values.

        Args:
            fetch: function that gets files into the folder that are on other machines; all ranks call it,
                with the names of those that they read.
        """
        ranks = self._in_thread.ranks

        def unloadable(error: BaseException) -> str:
            return f"{folder}: cannot be loaded ({reason(error)})."

        with self._all.together(unloadable, Exception):
            reader = Reader(folder, lambda names: fetch(names, ranks) if fetch else None)
        with self._all.together(unloadable, (Exception, CheckpointException)):
            dcp.load(state, storage_reader=reader, planner=Planner(), process_group=ranks.group)

    def _copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy in host memory, which stays for the next one."""
        if self._stager is None:
            from_device = self._device.type != "cpu"
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=from_device,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=from_device,
                )
            )
        copied = self._stager.stage(state)
        assert isinstance(copied, dict)  # and no future, as it is not asynchronous
        return copied

    def _write(
        self,
        name: str,
        state: dict[str, Any],
        facts: dict[str, Any],
        describe: Callable[[BaseException], str],
    ) -> None:
        """Write and publish; all ranks do, and all end alike."""
        with self._in_thread.undone_by(partial(self._abandon, name)):
            if self._neighbours is not None:
                self._neighbours.begin(name, self._in_thread, describe)
            of_ranks = self._written(name, state, describe)
            known = {file: of for files in of_ranks for file, of in files.items()}
            if self._neighbours is not None:
                small = (TRAINING_STATE, TORCH_METADATA)
                more, known = self._neighbours.complete(
                    name, of_ranks, small, self._in_thread, describe
                )
                facts = {**facts, **more}
            self._publish(name, facts, known, describe)

    def _write_and_log(self, done: Future[None], *arguments: Any) -> None:
        """The same in the thread, whose error is raised at the next save, but should be known now."""
        try:
            self._write(*arguments)
        except BaseException as error:
            self._failed(str(error))
            done.set_exception(error)
        else:
            done.set_result(None)

    def _written(
        self, name: str, state: dict[str, Any], describe: Callable[[BaseException], str]
    ) -> list[durable.Files]:
        """The files of each rank, written and on disk."""
        folder, writer = self.folder.staging / name, self.folder.writer()
        files, problem = _Files(writer), None
        left: str | None = None
        try:
            dcp.save(
                state,
                storage_writer=_Writer(folder, files),
                planner=self._planner(enable_plan_caching=True),
                process_group=self._in_thread.ranks.group,
            )
        except CheckpointException as error:  # on all ranks, if on one
            problem = error
        except BaseException as error:
            left = describe(error)
        if left is not None:
            # This rank may have left the others in the middle: they learn of it when it leaves the group. Not
            # before the exception is gone, whose frames refer to it.
            self._in_thread.ranks.close()
            raise CheckpointError(left)
        with self._in_thread.together(describe, (OSError, CheckpointException)):
            if cause := files.problem or problem:
                raise cause
            mine = writer.files(folder, folder.glob(f"__{self._all.ranks.rank}_*"))
        return self._in_thread.gather(mine)

    def _publish(
        self,
        name: str,
        facts: dict[str, Any],
        written: durable.Files,
        describe: Callable[[BaseException], str],
    ) -> None:
        with self._in_thread.together(describe, Exception):
            if self._publishes:
                self.folder.publish(name, facts, written)
        if self._all.ranks.is_zero:
            log.info(f"Saved the {self._what} {self.folder.path / name}.")

    def _abandon(self, name: str) -> None:
        if self._publishes:
            self.folder.abandon(name)


class _Files(FileSystem):
    """torch's files, hashed while they are written. It keeps the first error: torch's threads print theirs,
    and torch 2.13 loses them."""

    def __init__(self, writer: durable.Writer) -> None:
        self._writer = writer
        self.problem: OSError | None = None

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        try:
            with self._writer.create(Path(path)) as file:
                yield file
        except OSError as error:
            self.problem = self.problem or error


class _Writer(FileSystemWriter):
    """torch's writer, which also fails if one of its threads does: torch 2.13 loses their exceptions."""

    def __init__(self, folder: Path, files: FileSystem) -> None:
        super().__init__(folder, thread_count=_WRITERS, sync_files=False)
        self.fs = files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        written = super().write_data(plan, planner)
        if missing := len(plan.items) - len(written.value()):
            raise OSError(f"{missing} of {len(plan.items)} tensors were not written, see above")
        return written


def damage_in_share(folder: Path, checkpoint: str | None, rank: int, ranks: int) -> str | None:
    """What is damaged in a rank's share of a checkpoint's files; None if nothing is, or nobody can tell.

    Args:
        checkpoint: the id that it has where rank 0 is; None if torchtune saved it.
    """
    try:
        found = Checkpoint.read(folder)
        if found.facts["id"] != checkpoint:
            return f"rank {rank} has another one of this name"
        manifest = found.manifest
        assert manifest is not None
        durable.check_contents(folder, manifest, sorted(manifest.files)[rank::ranks])
    except durable.Damaged as damage:
        return None if checkpoint is None else str(damage)
    return None


def training_state_of(folder: Path) -> dict[str, Any]:
    """What a checkpoint has of ours; nothing if torchtune saved it."""
    file = folder / TRAINING_STATE
    return copy.deepcopy(read_file(str(file))) if file.exists() else {}
