"""Files and folders that exist whole or not at all, whenever the process is killed.

A folder of a checkpoint is written under another name on the same filesystem, sealed (every file flushed to
disk, a manifest with sizes and checksums written last), and published by one rename. What it replaces is
removed afterward.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

MANIFEST = ".checkpoint.json"
"""Hidden, because torchtune copies visible files of the folder that it starts from into what it saves."""

_FORMAT = 1
_READERS = 4  # files that are read at once; hashing releases the GIL


class Damaged(Exception):
    """A folder that is not what was published under its name. The message says why."""


Files = dict[str, tuple[int, str]]
"""Size in bytes and SHA-256 of each file, by its path in a folder."""


@dataclass(frozen=True)
class Manifest:
    """The content of a sealed folder."""

    facts: dict[str, Any]
    """The facts that the writer wants to know of the folder without opening its files."""
    files: Files


def flushed(folder: Path, paths: Iterable[Path], *, flush: bool = True) -> Files:
    """Flush files in ``folder`` to disk; what a manifest says of them.

    Args:
        flush: whether they are to outlive the machine, and not only this process.
    """
    paths = sorted(paths)
    with ThreadPoolExecutor(_READERS) as pool:
        checksums = list(pool.map(partial(_flush_and_hash, flush=flush), paths))
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_size, checksum)
        for path, checksum in zip(paths, checksums, strict=True)
    }


def seal(
    folder: Path, facts: dict[str, Any], known: Files | None = None, *, flush: bool = True
) -> None:
    """Flush everything in ``folder`` to disk, and write its manifest last.

    Args:
        known: the files that are on disk already, as ``flushed`` gives them.
        flush: as there.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    known = known or {}
    paths = [path for path in folder.rglob("*") if path.is_file()]
    rest = [path for path in paths if path.relative_to(folder).as_posix() not in known]
    files = known | flushed(folder, rest, flush=flush)
    content = {
        "format": _FORMAT,
        **facts,
        "files": {
            name: {"bytes": size, "sha256": checksum}
            for name, (size, checksum) in sorted(files.items())
        },
    }
    for below in folder.rglob("*"):
        if below.is_dir() and flush:
            _flush_folder(below)
    with atomically(folder / MANIFEST, flush=flush) as temporary:
        temporary.write_bytes(json.dumps(content, indent=1).encode())


@contextmanager
def atomically(path: Path, *, flush: bool = True) -> Iterator[Path]:
    """A temporary path on which to write a file, or to make a folder, that then takes the place of ``path``.

    It appears whole or not at all, whenever the program is killed and however many write at once. A folder
    cannot replace one that is not empty: that raises ``OSError``.

    Args:
        flush: whether that holds if the machine stops, too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as private:
        temporary = Path(private) / path.name
        yield temporary
        for written in (temporary, *temporary.rglob("*")):
            if written.is_file() and flush:
                with written.open("rb") as file:
                    os.fsync(file.fileno())
        temporary.replace(path)
    if flush:
        _flush_folder(path.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Replace a small file by one rename, and flush it."""
    with atomically(path) as temporary:
        temporary.write_bytes(content)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a sealed folder; ``Damaged`` if there is none that can be read."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        if content.pop("format") != _FORMAT:
            raise Damaged(f"its {MANIFEST} was written by another release")
        listed = content.pop("files").items()
        files = {name: (file["bytes"], file["sha256"]) for name, file in listed}
    except FileNotFoundError:
        raise Damaged(f"it has no {MANIFEST}") from None
    except OSError as error:
        raise Damaged(f"its {MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"its {MANIFEST} is damaged") from None
    if not files:
        raise Damaged(f"its {MANIFEST} is damaged: it lists no files")
    for name, (size, checksum) in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise Damaged(f"its {MANIFEST} lists {name}, which is outside of it")
        if type(size) is not int or type(checksum) is not str:
            raise Damaged(f"its {MANIFEST} is damaged: {name} has {size!r} bytes, {checksum!r}")
    return Manifest(content, files)


def check_sizes(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Raise ``Damaged`` unless every listed file (or those named) is there, in its size. Reads nothing."""
    for name in manifest.files if names is None else names:
        size, _ = manifest.files[name]
        try:
            found = (folder / name).stat()
        except OSError:
            raise Damaged(f"{name} is missing") from None
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{name} is no file")
        actual = found.st_size
        if actual != size:
            kind = "empty" if actual == 0 else "truncated" if actual < size else "too large"
            raise Damaged(f"{name} is {kind} ({actual} bytes instead of {size})")


def check_contents(folder: Path, manifest: Manifest, names: list[str]) -> None:
    """Raise ``Damaged`` unless these files have the content that was saved. Reads them all."""
    for problem in damaged(folder, manifest, names).values():
        raise Damaged(problem)


def damaged(folder: Path, manifest: Manifest, names: list[str]) -> dict[str, str]:
    """Those of some files that do not have the content that was saved, with the reason. Reads them all."""

    def check(name: str) -> str | None:
        try:
            with (folder / name).open("rb") as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return None if actual == manifest.files[name][1] else f"{name} is corrupted (checksum)"

    with ThreadPoolExecutor(_READERS) as pool:
        problems = [*pool.map(check, names)]
    return {
        name: problem for name, problem in zip(names, problems, strict=True) if problem is not None
    }


def publish(staged: Path, final: Path, trash: Path, *, flush: bool = True) -> None:
    """Rename a sealed folder to its final name; what has that name already is moved to ``trash`` first.

    A process that is killed between the two renames leaves the sealed folder under its staged name, from
    where it can be published later.
    """
    if flush:
        _flush_folder(staged.parent)
    if final.is_dir():
        _move(final, trash)
    staged.rename(final)
    if flush:
        _flush_folder(final.parent)


def remove(folder: Path, trash: Path) -> None:
    """Delete a folder so that no half of it is ever seen under its name."""
    if folder.exists():
        _move(folder, trash)
    shutil.rmtree(trash, ignore_errors=True)


def link(name: Path, target: Path) -> None:
    """Make ``name`` lead to ``target``, by one rename; a copy where the filesystem has no symbolic links."""
    name.parent.mkdir(parents=True, exist_ok=True)
    beside = name.with_name(f"{name.name}.{uuid.uuid4().hex[:8]}")
    try:
        beside.symlink_to(os.path.relpath(target, name.parent))
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        shutil.copyfile(target, beside)
        _flush_and_hash(beside)
    beside.replace(name)
    _flush_folder(name.parent)


def require_writable(folder: Path) -> None:
    """Make the folder if need be, and raise ``OSError`` unless a small file can be published in it."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".writable.{uuid.uuid4().hex[:8]}"
    write_durably(probe, b"?")
    probe.unlink()


def _move(folder: Path, trash: Path) -> None:
    trash.mkdir(parents=True, exist_ok=True)
    folder.rename(trash / f"{folder.name}.{uuid.uuid4().hex[:8]}")


def _flush_and_hash(path: Path, flush: bool = True) -> str:
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
        if flush:
            os.fsync(file.fileno())
    return checksum


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems have none
            raise
    finally:
        os.close(descriptor)
