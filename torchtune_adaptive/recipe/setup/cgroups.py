"""Control groups, by which a container may use less memory than its machine has; see cgroups(7)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_NO_LIMIT = 1 << 60  # version 1 has no word for it: a number that no machine has


@dataclass(frozen=True)
class _Version:
    """Where a version of control groups says what."""

    mount: str
    limit: str
    used: str
    cached: tuple[str, ...]
    """Names in ``memory.stat``."""


_FIRST = _Version(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_SECOND = _Version(
    "sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file")
)


@dataclass(frozen=True)
class ControlGroup:
    """A control group whose memory is limited."""

    total: int
    """Its limit, in bytes."""
    _folder: Path
    _version: _Version

    @property
    def available(self) -> int:
        """Bytes that its processes can get now. Cached files are given back for them."""
        used = int((self._folder / self._version.used).read_text())
        stat = (self._folder / "memory.stat").read_text()
        parts = (line.split() for line in stat.splitlines())
        cached = sum(int(value) for name, value in parts if name in self._version.cached)
        return self.total - max(0, used - cached)


def limiting_groups(root: Path = Path("/")) -> list[ControlGroup]:
    """The control groups that limit the memory of this process: its own, and those above it."""
    found = []
    for version, folder in _groups(root):
        try:
            limit = int((folder / version.limit).read_text())
        except (OSError, ValueError):  # not to be seen from within a container, or "max"
            continue
        if limit < _NO_LIMIT:
            found.append(ControlGroup(limit, folder, version))
    return found


def available_memory() -> int:
    """Bytes that processes of this host can get now; of a container, that it lets them have."""
    return min(each.available for each in (psutil.virtual_memory(), *limiting_groups()))


def _groups(root: Path) -> Iterator[tuple[_Version, Path]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _FIRST if controllers else _SECOND
        # The path may be that on the machine, of which a container sees the top only, or begin above it.
        own = PurePosixPath(path.replace("/..", "") or "/").relative_to("/")
        for group in (own, *own.parents):
            yield version, root / version.mount / group
