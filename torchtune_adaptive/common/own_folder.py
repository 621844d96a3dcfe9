"""Folders in places that all users of a machine share, such as its memory."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

_LOCK = ".used"


def make_own_folder(path: Path) -> None:
    """Make a folder that only this user may enter, or see that it is one.

    Raises:
        OSError: it belongs to somebody else, is a link, or is open to others.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = os.lstat(path)
    why = ""
    if not stat.S_ISDIR(found.st_mode):
        why = "it is a link, or no folder"
    elif found.st_uid != os.geteuid():
        why = f"it belongs to another user ({found.st_uid})"
    elif found.st_mode & 0o077:
        why = "other users may enter it"
    if why:
        raise PermissionError(errno.EPERM, why, str(path))


def use_folder(path: Path) -> int:
    """Keep others from removing a folder for as long as the file that this returns is open."""
    return _locked(path, fcntl.LOCK_SH)


def remove_unused(path: Path) -> None:
    """Remove a folder if no process uses it."""
    with suppress(OSError):
        file = _locked(path, fcntl.LOCK_EX)
        shutil.rmtree(path, ignore_errors=True)
        os.close(file)


def _locked(path: Path, how: int) -> int:
    file = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file
