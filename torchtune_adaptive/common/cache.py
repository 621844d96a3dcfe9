"""Values that are worth keeping from run to run, each under the facts that it holds for.

One file for each value, named by a fingerprint of the facts, with the facts in it. Whatever is wrong with a
file or its folder, it is a value that is not cached, never an error.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

from torchtune_adaptive.common.durable import atomically

log = logging.getLogger(__name__)
_LIBRARIES = ("torch", "torchtune", "torchao", "torchtune-adaptive")
Kind = Literal["batch_sizes", "row_lengths", "traces", "calibrations", "speeds", "self_checks"]
"""The kinds of what is cached, each in a folder of its own."""
V = TypeVar("V")


def user_cache() -> Path | None:
    """This package's folder in the user's cache, or None for a user without a home."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "torchtune_adaptive"
    try:
        return Path.home() / ".cache" / "torchtune_adaptive"
    except RuntimeError as error:
        _warn_once("the user's home", str(error))
        return None


def keep_private(folder: Path) -> None:
    """Let only the user see a folder in the user's cache; the mode of any other is the user's to choose."""
    if (base := user_cache()) is not None and folder.is_relative_to(base):
        folder.mkdir(parents=True, exist_ok=True)
        base.chmod(0o700)


def cached_files(base: Path) -> dict[Kind, list[Path]]:
    """The files of each kind in a cache folder: values, and arrays that are kept beside them."""
    return {
        kind: sorted(path for path in (base / kind).glob("*") if path.suffix in (".json", ".npy"))
        for kind in get_args(Kind)
    }


def cache_folder(setting: bool | str, kind: Kind) -> Path | None:
    """The folder for values of a kind: in the user's cache (True), in another folder, or none (False)."""
    if setting is False:
        return None
    if setting is True:
        base = user_cache()
        return None if base is None else base / kind
    try:
        return Path(setting).expanduser() / kind
    except RuntimeError as error:  # ~somebody
        _warn_once(setting, str(error))
        return None


@functools.cache
def _warn_once(folder: str, reason: str) -> None:
    """One line for each folder, however many values it should hold."""
    log.warning(f"Continuing without a cache in {folder}: {reason}.")


def libraries() -> dict[str, str]:
    """The versions that decide how a run behaves."""
    return {name: version(name) for name in _LIBRARIES}


def versions_of(*packages: str) -> dict[str, str | None]:
    """The versions of packages; None for one that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@functools.cache
def package_fingerprint() -> str:
    """A fingerprint of this package's source, for values that become stale when it changes."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class Cache(Generic[V]):
    """Values of one kind in a folder; without one, nothing is kept."""

    folder: Path | None
    what: str
    """The name of such a value, for messages: "batch size"."""
    valid: Callable[[Any], bool]
    """Whether something read can be such a value."""
    most: int | None = None
    """The number of values that are kept; the oldest are removed."""

    def get(self, facts: Mapping[str, Any]) -> V | None:
        """The value under exactly these facts."""
        if self.folder is None:
            return None
        path = self.folder / self.file_name(facts)
        entry = self._read(path)
        if entry is not None and entry[0] != _plain(facts):
            log.warning(f"Ignoring cached {self.what} in {path}: it belongs to a different run.")
            return None
        return entry[1] if entry else None

    def all(self) -> list[tuple[dict[str, Any], V]]:
        """All values, with their facts."""
        try:
            paths = sorted(self.folder.glob("*.json")) if self.folder else []
        except OSError as error:
            self.give_up(error)
            return []
        return [entry for path in paths if (entry := self._read(path))]

    def _read(self, path: Path) -> tuple[dict[str, Any], V] | None:
        try:
            entry = json.loads(path.read_text())
            facts, value = entry["facts"], entry["value"]
            if entry["checksum"] != _checksum(facts, value):
                raise ValueError("it does not match its checksum")
            if not self.valid(value):
                raise ValueError("invalid value")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            self.give_up(error)
            return None
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            log.warning(f"Ignoring cached {self.what} in {path}: {reason}.")
            return None
        return facts, value

    def put(self, facts: Mapping[str, Any], value: V) -> None:
        """Keep a value."""
        if self.folder is None:
            return
        entry = {"facts": _plain(facts), "value": _plain(value)}
        entry["checksum"] = _checksum(**entry)
        try:
            keep_private(self.folder)
            with atomically(self.folder / self.file_name(facts)) as temporary:
                temporary.write_text(json.dumps(entry))
            self._prune(self.folder)
        except OSError as error:
            self.give_up(error)

    @staticmethod
    def file_name(facts: Mapping[str, Any]) -> str:
        """The name of the file of a value."""
        text = json.dumps(_plain(facts), sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def _prune(self, folder: Path) -> None:
        if self.most is not None:
            newest_first = sorted(folder.glob("*.json"), key=lambda p: -p.stat().st_mtime)
            for path in newest_first[self.most :]:
                path.unlink(missing_ok=True)

    def give_up(self, error: OSError) -> None:
        """Say, once for each folder, that nothing can be kept in it."""
        assert self.folder is not None
        _warn_once(str(self.folder.parent), error.strerror or str(error))


def _checksum(facts: Any, value: Any) -> str:
    text = json.dumps([facts, value], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """As JSON gives it back, so that what was written equals what is read."""
    return json.loads(json.dumps(value, default=str))
