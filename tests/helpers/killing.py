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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torchtune import config

from torchtune_adaptive.common import durable
from torchtune_adaptive.core import Watchdog
from torchtune_adaptive.recipe.train import attempts as attempts_module

_OPERATIONS = frozenset(
    ["os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"]
)


def before_each_operation(act: Callable[[Path | None], object]) -> None:
    """Call ``act`` before each operation on files of this process, for as long as it lives.

    What Python does is seen by what it reports to audit hooks, which cannot be removed again. A file that a
    ``durable.Writer`` writes counts twice: before it is written, and when half of it has been; ``act`` is
    called with its path then.
    """
    acting = threading.local()

    def call(half_written: Path | None = None) -> None:
        if not getattr(acting, "now", False):  # or what it does itself would count
            acting.now = True
            try:
                act(half_written)
            finally:
                acting.now = False

    @contextmanager
    def create_and_call(writer: durable.Writer, path: Path) -> Iterator[Any]:
        call()
        with create(writer, path) as file:
            yield file
            call(path)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
        if writes or event in _OPERATIONS:
            call()

    def flush(descriptor: int) -> None:
        call()
        fsync(descriptor)

    fsync, os.fsync = os.fsync, flush
    create, durable.Writer.create = durable.Writer.create, create_and_call  # type: ignore[method-assign]
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


Operation = tuple[str, Path, Path | None]
"""What is done with a path: ``write``, for opened to be written, ``make``, ``rename`` to the other one,
``flush`` or ``remove``; or ``end``: what was saved is to last from here on."""


def record_operations() -> list[Operation]:
    """The operations on files and folders of this process from now on, for as long as it lives."""
    operations: list[Operation] = []
    names = {
        **{"os.mkdir": "make", "os.symlink": "make", "os.rename": "rename"},
        **{"os.remove": "remove", "os.rmdir": "remove", "shutil.rmtree": "remove"},
    }

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[2] & os.O_ACCMODE:
            operations.append(("write", Path(arguments[0]), None))
        elif event in names and (event == "shutil.rmtree" or arguments[-1] in (-1, None)):
            first, second, *_ = (*arguments, None)
            if event == "os.symlink":
                first, second = second, None
            renamed = Path(second) if event == "os.rename" else None
            if names[event] != "make" or not os.path.lexists(first):
                operations.append((names[event], Path(first), renamed))

    def flush(descriptor: int) -> None:
        fsync(descriptor)
        operations.append(("flush", Path(os.readlink(f"/proc/self/fd/{descriptor}")), None))

    fsync, os.fsync = os.fsync, flush
    sys.addaudithook(hook)
    return operations


class _Lasting:
    """What a machine that loses power has of the files of a process, by its operations.

    A file has its content once it is flushed, and a name, of a file or a folder, once its folder is.
    """

    def __init__(self) -> None:
        self.unwritten: set[Path] = set()
        """Files of which what was written may be lost."""
        self.unnamed: set[Path] = set()
        """Paths that may not be there."""

    def follow(self, operation: Operation) -> None:
        kind, path, other = operation
        if kind == "flush":
            self.unwritten.discard(path)
            self.unnamed -= {each for each in self.unnamed if each.parent == path}
        elif kind == "remove":
            for paths in (self.unwritten, self.unnamed):
                paths -= within(path, paths)
        elif kind == "rename" and other is not None:
            for paths in (self.unwritten, self.unnamed):
                moved = within(path, paths)
                paths -= moved | within(other, paths)
                paths |= {other / each.relative_to(path) for each in moved}
            self.unnamed.add(other)
        elif kind in ("make", "write"):
            self.unnamed.add(path)
            if kind == "write":
                self.unwritten.add(path)

    def lost(self, path: Path) -> set[Path]:
        """What may be lost of a path, of what is in it, and of the folders that it is in."""
        above = {each for each in self.unnamed if path.is_relative_to(each)}
        return above | within(path, self.unwritten | self.unnamed)


def within(folder: Path, paths: Iterable[Path]) -> set[Path]:
    """The paths that are this one or below it."""
    return {each for each in paths if each.is_relative_to(folder)}


def what_power_may_take(operations: Sequence[Operation], out: Path) -> list[str]:
    """What may be missing of the checkpoints in an output folder if the machine loses power at any moment.

    A manifest is there only after the files that it lists; a checkpoint, only after all that is in it; and
    what it supersedes goes only after it is there.
    """
    lasting, found, newest, sealed = _Lasting(), list[str](), out, set[Path]()

    def require(what: str, lost: Iterable[Path]) -> None:
        found.extend(f"{what}: {each}" for each in lost)

    for operation in operations:
        kind, path, other = operation
        if other is not None and other.name == durable.MANIFEST:
            staged, beside = other.parent, path.parent
            below = within(staged, lasting.unnamed) - within(beside, lasting.unnamed)
            listed = {each for each in below if each != staged and each.parent != staged}
            require("a manifest", within(staged, lasting.unwritten) | listed)
            sealed.add(staged)
        elif other is not None and path.parent == out / ".saving" and other.parent == out:
            require("a checkpoint", lasting.lost(path))
            newest = other
            sealed.discard(path)
        elif kind in ("rename", "remove") and path.is_relative_to(out):
            if (kept := path.relative_to(out).parts[:1]) and "epoch_" in kept[0]:
                staged = out / ".saving" / kept[0]
                require("what replaces it", lasting.lost(staged if staged in sealed else newest))
        elif kind == "end":
            require("the end", lasting.lost(newest) | lasting.lost(out / "recipe_state"))
        lasting.follow(operation)
    return found


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
