"""A lock on a folder, so that no two runs write into it at the same time."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
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
        self._file = None
        try:
            self._file = (folder / LOCK).open("a+")
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            if self._file is not None:
                self._file.seek(0)
                owner = self._file.read().strip()
                self.release()
                raise FolderInUse(f"{folder}: another run is using it ({owner})") from None
            _warn(folder, error)
        except OSError as error:
            self.release()
            _warn(folder, error)
        else:
            self._sign()

    def _sign(self) -> None:
        """Write into the file whose it is, for the message of another process."""
        assert self._file is not None
        try:
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._file.flush()
        except OSError as error:  # the lock holds nevertheless
            log.debug(f"The lock of a folder is not signed: {error}")

    def release(self) -> None:
        """Let others have the folder."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _warn(folder: Path, error: OSError) -> None:
    log.warning(
        f"{folder}: cannot be locked ({error.strerror}), so make sure that no other run uses it."
    )
