"""Folders in places that all users of a machine share, such as its memory."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path


def make_own_folder(path: Path) -> None:
    """Make a folder that only this user may enter, or see that it is one.

    Raises:
        OSError: it is somebody else's, a link, or open to others.
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
