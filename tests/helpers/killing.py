"""What a process leaves that is killed, or whose disk fails, at one of its operations on files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torchtune import config
from torchtune.training.checkpointing import _checkpointer

from torchtune_adaptive.core import Watchdog
from torchtune_adaptive.recipe.train import attempts as attempts_module

_OPERATIONS = frozenset(
    ["os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"]
)


def before_each_operation(act: Callable[[Path | None], object]) -> None:
    """Call ``act`` before each operation on files of this process, for as long as it lives.

    What Python does is seen by what it reports to audit hooks, which cannot be removed again. What is written
    by torch and safetensors counts twice: before it is written, and when half of it has been; ``act`` is
    called with the path of that file then.
    """
    acting = threading.local()

    def call(half_written: Path | None = None) -> None:
        if not getattr(acting, "now", False):  # or what it does itself would count
            acting.now = True
            try:
                act(half_written)
            finally:
                acting.now = False

    def in_halves(save: Callable[..., Any]) -> Callable[..., Any]:
        def save_and_call(content: Any, file: Any, **settings: Any) -> None:
            call()
            save(content, file, **settings)
            if isinstance(file, (str, Path)):
                call(Path(file))

        return save_and_call

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
        if writes or event in _OPERATIONS:
            call()

    def flush(descriptor: int) -> None:
        call()
        fsync(descriptor)

    fsync, os.fsync = os.fsync, flush
    torch.save = in_halves(torch.save)
    _checkpointer.save_file = in_halves(_checkpointer.save_file)
    sys.addaudithook(hook)


def kill_at(number: int) -> None:
    """Kill this process just before its n-th operation on files."""
    operations = count(1)

    def act(half_written: Path | None) -> None:
        if next(operations) == number:
            if half_written is not None:
                _halve(half_written)
            os.kill(os.getpid(), signal.SIGKILL)

    before_each_operation(act)


class Fault:
    """An error of the disk at the n-th operation on files, and at all that follow if it stays."""

    ERRORS = (errno.ENOSPC, errno.EROFS, errno.EIO)

    def __init__(self) -> None:
        self.number, self.seen, self.stays = 0, 0, False
        before_each_operation(self.strike)

    def arm(self, number: int, stays: bool = False) -> None:
        """Begin to count; 0 is for no error."""
        self.number, self.seen, self.stays = number, 0, stays

    def strike(self, _: Path | None) -> None:
        self.seen += 1
        if self.number and (self.seen == self.number or (self.stays and self.seen > self.number)):
            error = self.ERRORS[self.number % 3]
            raise OSError(error, os.strerror(error), "file")


class Copies:
    """Copies of a folder as this process would leave it if it was killed: one of each state that it is in.

    Several ranks may do this with the same folder; each copies it at its own operations.

    Args:
        folder: what is copied.
        into: where copies are kept, in folders of their own.
        state: says what state a copy is in; it may change the copy.
        every: of so many operations only one.
        first: the first of these operations.
    """

    def __init__(
        self,
        folder: Path,
        into: Path,
        state: Callable[[Path], str],
        every: int = 1,
        first: int = 0,
    ) -> None:
        self.operations = 0
        self.states: list[str] = []
        """Of all copies, in order."""
        self.kept: dict[str, Path] = {}
        """The first copy in each state."""
        self._folder, self._into, self._state = folder, into, state
        self._every, self._first = every, first
        into.mkdir(parents=True)
        before_each_operation(self._look)

    def _look(self, half_written: Path | None) -> None:
        lock = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other threads and ranks wait before their operations
            self.operations += 1
            if (self.operations - self._first) % self._every == 0:
                self._copy(self._into / str(self.operations), half_written)
        finally:
            os.close(lock)

    def _copy(self, copy: Path, half_written: Path | None) -> None:
        for _ in range(20):
            before = _listed(self._folder)
            with suppress(shutil.Error):
                shutil.copytree(self._folder, copy, symlinks=True)
                if _listed(self._folder) == before:
                    break
            # The operation of another thread or rank had begun, such as a rename that is seen at neither
            # place: this is no state of any moment.
            shutil.rmtree(copy)
        else:
            raise AssertionError(f"{self._folder} does not stay as it is for a copy")
        if half_written is not None:
            _halve(copy / half_written.relative_to(self._folder))
        looked_at = copy.with_suffix(".looked_at")
        shutil.copytree(copy, looked_at, symlinks=True, copy_function=os.link)
        state = self._state(looked_at)
        shutil.rmtree(looked_at)
        self.states.append(state)
        if self.kept.setdefault(state, copy) is not copy:
            shutil.rmtree(copy)


def _listed(folder: Path) -> set[tuple[str, int]]:
    """The paths in a folder, with their inodes."""
    found = set[tuple[str, int]]()
    for path, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # it is missing after that as well
                each = os.path.join(path, name)
                found.add((each, os.lstat(each).st_ino))
    return found


def _halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def in_child(work: Callable[[], object]) -> int:
    """Call ``work`` in a forked process; how that ended."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


Fatal = tuple[int, str, int]
"""A rank, what begins the name of the watchdog's phase in which it gets a signal, and the signal."""


def deadly(fatal: Sequence[Fatal]) -> dict[str, str]:
    """The environment for a launched run with ``deadly_rows``: how each attempt ends; those that follow are
    left alone."""
    here = str(Path(__file__).parents[2])
    python_path = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    return {"FATAL": json.dumps(fatal), "PYTHONPATH": python_path}


def deadly_rows(*given: Any, rows: str, **settings: Any) -> Any:
    """A dataset in whose runs ranks get signals: see ``deadly``."""
    attempts_module._EVERY = 0.0  # the steps of tiny models are many in a second
    attempts = json.loads(os.environ["FATAL"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt < len(attempts):
        rank, fatal, number = attempts[attempt]
        if rank == int(os.environ["RANK"]):
            _signal_in(fatal, number)
    return config.instantiate(OmegaConf.create({"_component_": rows, **settings}), *given)


def _signal_in(fatal: str, number: int) -> None:
    """Send this process a signal when it enters a phase; or kill it where it has saved a part."""
    enter = Watchdog.enter

    def enter_and_die(self: Watchdog, phase: str, patience: float | None) -> None:
        enter(self, phase, patience)
        if phase.startswith(fatal):
            Watchdog.enter = enter  # type: ignore[method-assign]
            if phase.startswith("saving"):
                kill_at(12)
            else:
                os.kill(os.getpid(), number)

    Watchdog.enter = enter_and_die  # type: ignore[method-assign]
