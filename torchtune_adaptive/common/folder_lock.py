"""A lock on a folder, so that no two runs write into it at the same time."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

LOCK = ".lock"
LEASE = 180.0
"""Seconds that a network filesystem may take to give back the lock of a machine that is gone."""
_TAKEN = (errno.EAGAIN, errno.EACCES)
_held: dict[tuple[int, str], tuple[int, int]] = {}
"""By process and real path, the files of the locks that there are, and how often each was taken. A process
that was forked has those of another."""


class FolderInUse(Exception):
    """Another process has locked the folder. The message says which."""


class FolderLock:
    """Keeps a folder for this process until it ends, however it ends.

    The kernel holds the lock, so a process that is killed leaves none behind; the file stays, and says
    nothing by itself. It is a lock of the process: processes that this one forks do not have it, and this one
    may take it more than once. Where the filesystem has no locks, a warning is all there is. A lock of
    another machine is waited for, as that may be gone.

    Raises:
        FolderInUse: another process has it.
    """

    def __init__(self, folder: Path) -> None:
        self._key: tuple[int, str] | None = (os.getpid(), os.path.realpath(folder))
        file, count = _held.get(self._key, (None, 0))
        if file is None:
            # Not through a link, at whose end another file would be written.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            try:
                file = os.open(folder / LOCK, flags, 0o666)
                _wait_for(file, folder)
            except OSError as error:
                self._key = None
                if file is not None:
                    os.close(file)
                log.warning(
                    f"{folder}: cannot be locked ({error.strerror}), so make sure that no other run uses it."
                )
                return
            with suppress(OSError):  # it holds nevertheless
                os.truncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        _held[self._key] = file, count + 1

    def release(self) -> None:
        """Let others have the folder, if this process has not taken it elsewhere as well."""
        key, self._key = self._key, None
        if key is not None:
            file, count = _held.pop(key)
            if count > 1:
                _held[key] = file, count - 1
            else:
                os.close(file)


def _wait_for(file: int, folder: Path) -> None:
    """Lock a file, or say who has it; ``OSError`` if it cannot be locked at all."""
    end: float | None = None
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        owner = "unknown"
        with suppress(OSError):
            owner = os.pread(file, 1000, 0).decode(errors="replace")
        is_elsewhere = " on " in owner and not owner.endswith(f" on {socket.gethostname()}")
        if end is None and is_elsewhere:
            end = time.monotonic() + LEASE
            log.warning(
                f"{folder}: locked by {owner}. Waiting up to {LEASE:g} s, as that machine may be gone."
            )
        if end is None or time.monotonic() > end:
            os.close(file)
            raise FolderInUse(f"{folder}: another run is using it ({owner})")
        time.sleep(1)
