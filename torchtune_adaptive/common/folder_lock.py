"""A lock on a folder, so that no two runs write into it at the same time."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

LOCK = ".lock"
LEASE = 180.0
"""Seconds that a network filesystem may take to give back the lock of a machine that is gone."""
_held: dict[tuple[int, int], list[int]] = {}
"""By device and inode, the files that this process has locked: the descriptor, and how often it was taken."""


class FolderInUse(Exception):
    """Another process has locked the folder. The message says which."""


class FolderLock:
    """Keeps a folder for this process until it ends, however it ends.

    The kernel holds the lock, so a process that is killed leaves none behind; the file stays, and says
    nothing by itself. It is a lock of the process: processes that this one forks do not have it, and this one
    may take it more than once. Where the filesystem has no locks, a warning is all there is. A lock of
    another machine is waited for, as that may be gone.

    It is one of ``flock``. Those of ``lockf`` are lost as soon as anything in the process closes the file. To
    the server of an NFS, both are locks of all bytes of the file.

    Args:
        waits: function that is told for how many seconds another machine's lock is waited for, if it is.

    Raises:
        FolderInUse: another process has it.
    """

    def __init__(self, folder: Path, waits: Callable[[float], object] = lambda _: None) -> None:
        self._key: tuple[int, int] | None = None
        try:
            with ExitStack() as unless_kept:
                # Not through a link, at whose end another file would be written.
                file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                unless_kept.callback(os.close, file)
                key = (os.fstat(file).st_dev, os.fstat(file).st_ino)
                if key not in _held:
                    _leave_to_parent_when_forked()
                    _lock(file, folder, waits)
                    _held[key] = [file, 0]
                    unless_kept.pop_all()
            _held[key][1] += 1
            self._key = key
        except OSError as error:
            log.warning(
                f"{folder}: cannot be locked ({error.strerror}), so make sure that no other run uses it."
            )

    def release(self) -> None:
        """Let others have the folder, unless this process has taken it elsewhere as well."""
        if self._key in _held:
            _held[self._key][1] -= 1
            if not _held[self._key][1]:
                os.close(_held.pop(self._key)[0])
        self._key = None


def _lock(file: int, folder: Path, waits: Callable[[float], object]) -> None:
    """Lock a file, and write into it who has it; ``OSError`` if it cannot be locked at all."""
    end: float | None = None
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            owner = os.pread(file, 1000, 0).decode(errors="replace") or "unknown"
        is_elsewhere = " on " in owner and not owner.endswith(f" on {socket.gethostname()}")
        if end is None and is_elsewhere:
            end = time.monotonic() + LEASE
            waits(LEASE)
            log.warning(
                f"{folder}: {owner} has locked it. Waiting up to {LEASE:g} s, as that machine may be gone."
            )
        if end is None or not is_elsewhere or time.monotonic() > end:
            raise FolderInUse(f"{folder}: another run is using it ({owner})")
        time.sleep(1)
    with suppress(OSError):  # it holds nevertheless
        os.truncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


@cache
def _leave_to_parent_when_forked() -> None:
    os.register_at_fork(after_in_child=_leave_to_parent)


def _leave_to_parent() -> None:
    """Close what a forked process has of its parent's locks: each lasts until all have closed the file."""
    for file, _ in _held.values():
        os.close(file)
    _held.clear()
