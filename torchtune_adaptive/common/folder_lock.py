"""A lock on a folder, so that no two runs write into it at the same time."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

LOCK = ".lock"


class FolderInUse(Exception):
    """Another process has locked the folder. The message says which."""


class FolderLock:
    """Keeps a folder for this process until it ends, however it ends.

    The kernel holds the lock, so a process that is killed leaves none behind; the file stays, and says
    nothing by itself. It is a lock of the process: processes that this one forks do not have it, and this one
    may take it twice. Where the filesystem has no locks, a warning is all there is.

    Raises:
        FolderInUse: another process has it.
    """

    def __init__(self, folder: Path) -> None:
        self._file: int | None = None
        try:
            self._file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = self._owner() if error.errno in (errno.EAGAIN, errno.EACCES) else None
            self.release()
            if owner is not None:
                raise FolderInUse(f"{folder}: another run is using it ({owner})") from None
            log.warning(
                f"{folder}: cannot be locked ({error.strerror}), so make sure that no other run uses it."
            )
            return
        with suppress(OSError):  # it holds nevertheless
            os.truncate(self._file, 0)
            os.write(self._file, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def _owner(self) -> str | None:
        """Who has the lock, as far as the file says; None if it could not be opened."""
        if self._file is None:
            return None
        with suppress(OSError):
            return os.read(self._file, 1000).decode(errors="replace")
        return "unknown"

    def release(self) -> None:
        """Let others have the folder."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
