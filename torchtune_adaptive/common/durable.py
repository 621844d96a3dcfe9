"""Files and folders that exist whole or not at all, whenever the process is killed.

A folder of a checkpoint is written under another name on the same filesystem, sealed (every file flushed to
disk, a manifest with sizes and checksums written last), and published by one rename. What it replaces is
removed afterward. Large files are hashed while they are written, so the manifest says what was to be there.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
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
_PIECE = 1 << 20  # bytes that are written and hashed together, and stay in the processor's cache


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


class HashedFile(io.RawIOBase):
    """A new file that hashes what is written to it. It raises errors of the disk only when it is closed.

    Some come only then, and only to the descriptor that wrote: of quotas, and of network filesystems. Earlier
    ones wait, because torch makes others of them, which do not say what is wrong with the disk.

    Args:
        flush: whether it is to outlive the machine, and not only this process.
    """

    def __init__(self, path: Path, *, flush: bool = True) -> None:
        self.size = 0
        self._path, self._flush, self._hash = path, flush, hashlib.sha256()
        self._problem: OSError | None = None
        self._file = self._try(open, path, "wb", 0)

    @property
    def checksum(self) -> str:
        return self._hash.hexdigest()

    def tell(self) -> int:
        return self.size

    def write(self, content: Any) -> int:
        content = memoryview(content).cast("B")
        for start in range(0, len(content), _PIECE):
            piece = content[start : start + _PIECE]
            self._hash.update(piece)
            while self._problem is None and len(piece):
                piece = piece[self._try(self._file.write, piece) :]
        self.size += len(content)
        return len(content)

    def close(self) -> None:
        """Flush and close it, and raise the first ``OSError`` that there has been."""
        if self.closed:
            return
        super().close()
        if self._problem is None and self._flush:
            self._try(os.fsync, self._file.fileno())
        if self._file is not None:
            self._try(self._file.close)
        if self._problem is not None:
            self._problem.filename = str(self._path)
            raise self._problem

    def _try(self, work: Callable[..., Any], *given: Any) -> Any:
        try:
            return work(*given)
        except OSError as error:
            self._problem = self._problem or error


class Writer:
    """Writes files, and knows what is in them, whatever they are called later.

    Args:
        flush: whether they are to outlive the machine.
    """

    def __init__(self, *, flush: bool = True) -> None:
        self._flush = flush
        self._written: dict[tuple[int, ...], tuple[int, str]] = {}

    @contextmanager
    def create(self, path: Path) -> Iterator[Any]:
        """A ``HashedFile``. It is on disk when the context ends, which raises what the disk has said."""
        with HashedFile(path, flush=self._flush) as file:
            yield file
        self._written[_identity(path)] = file.size, file.checksum

    def files(self, folder: Path, paths: Iterable[Path] | None = None) -> Files:
        """What a manifest says of those that are in ``folder``, or have these paths there."""
        return {
            path.relative_to(folder).as_posix(): found
            for path in (folder.rglob("*") if paths is None else paths)
            if (found := self._written.get(_identity(path)))
        }


def seal(
    folder: Path, facts: dict[str, Any], known: Files | None = None, *, flush: bool = True
) -> None:
    """Flush everything in ``folder`` to disk, and write its manifest last.

    Args:
        known: the files that are on disk already, as a ``Writer`` gives them. The others are read, and should
            be small, or written by what raises errors of closing them, as Python does.
        flush: whether they are to outlive the machine, and not only this process.
    """
    known, manifest = known or {}, folder / MANIFEST
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    rest = {
        name: path
        for name, path in paths.items()
        if path.is_file() and path != manifest and name not in known
    }
    with ThreadPoolExecutor(_READERS) as pool:
        read = pool.map(partial(_flush_and_hash, flush=flush), rest.values())
        files = {**known, **dict(zip(rest, read, strict=True))}
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
    with atomically(manifest, flush=flush) as temporary:
        temporary.write_bytes(json.dumps(content, indent=1).encode())


@contextmanager
def atomically(path: Path, *, flush: bool = True) -> Iterator[Path]:
    """A temporary path on which to write a file, or to make a folder, that then takes the place of ``path``.

    It appears whole or not at all, whenever the program is killed and however many write at once. A folder
    cannot replace one that is not empty: that raises ``OSError``.

    Args:
        flush: whether that holds if the machine stops, too.
    """
    make_folder(path.parent, flush=flush)
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
        _flush_folder(final.parent)  # which may have the folder of what is staged only now
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
    make_folder(name.parent)
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
    make_folder(folder)
    probe = folder / f".writable.{uuid.uuid4().hex[:8]}"
    write_durably(probe, b"?")
    probe.unlink()


def make_folder(folder: Path, *, flush: bool = True) -> None:
    """Make a folder, and those above it, if need be; flush the names of those that are new."""
    if not folder.exists():
        make_folder(folder.parent, flush=flush)
        folder.mkdir(exist_ok=True)
        if flush:
            _flush_folder(folder.parent)


def _move(folder: Path, trash: Path) -> None:
    trash.mkdir(parents=True, exist_ok=True)
    folder.rename(trash / f"{folder.name}.{uuid.uuid4().hex[:8]}")


def _identity(path: Path) -> tuple[int, ...]:
    """What a file keeps that is renamed, and not changed."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _flush_and_hash(path: Path, flush: bool = True) -> tuple[int, str]:
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
        if flush:
            os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, checksum


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems have none
            raise
    finally:
        os.close(descriptor)
