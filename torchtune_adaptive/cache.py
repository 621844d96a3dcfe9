"""Values that are worth keeping from run to run, each under the facts that it holds for.

One file for each value, named by a fingerprint of the facts, with the facts in it. Whatever is wrong with a
file, it is a value that is not remembered, never an error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)
_LIBRARIES = ("torch", "torchtune", "torchao", "torchtune-adaptive")
V = TypeVar("V")


def cache_folder(setting: bool | str, kind: str) -> Path | None:
    """Where values of a kind are kept, as the setting says: in the user's cache folder, in a folder of
    their own, or not at all."""
    if setting is False:
        return None
    if setting is True:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / "torchtune_adaptive" / kind
    return Path(setting).expanduser() / kind


def libraries() -> dict[str, str]:
    """The versions that decide how a run behaves."""
    return {name: version(name) for name in _LIBRARIES}


@cache
def package_fingerprint() -> str:
    """A fingerprint of this package's source, for what would be stale when that changes."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


class Cache(Generic[V]):
    """Values of one kind in a folder; without one, nothing is ever remembered.

    Args:
        folder: where.
        what: they are, for messages: "batch size".
        valid: whether something read is such a value.
        most: how many are kept; those that were written longest ago go.
    """

    def __init__(
        self,
        folder: Path | None,
        what: str,
        valid: Callable[[Any], bool],
        most: int | None = None,
    ) -> None:
        self._folder = folder
        self._what = what
        self._valid = valid
        self._most = most

    def get(self, facts: Mapping[str, Any]) -> V | None:
        """The value under exactly these facts."""
        path = self._path(facts)
        if path is None or not path.exists():
            return None
        entry = self._read(path)
        if entry is not None and entry[0] != _plain(facts):
            log.warning(f"Not using the remembered {self._what} in {path}: it is of another run.")
            return None
        return entry[1] if entry else None

    def all(self) -> list[tuple[dict[str, Any], V]]:
        """All values, with their facts."""
        paths = self._folder.glob("*.json") if self._folder else ()
        return [entry for path in paths if (entry := self._read(path))]

    def _read(self, path: Path) -> tuple[dict[str, Any], V] | None:
        try:
            entry = json.loads(path.read_text())
            facts, value = entry["facts"], entry["value"]
            if not self._valid(value):
                raise ValueError("what it holds makes no sense")
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning(f"Not using the remembered {self._what} in {path}: {error}.")
            return None
        return facts, value

    def put(self, facts: Mapping[str, Any], value: V) -> None:
        """Remember a value; whole or not at all, so that two jobs at once do no harm."""
        path = self._path(facts)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                json.dump({"value": value, "facts": _plain(facts)}, file)
            os.replace(file.name, path)
            self._prune(path.parent)
        except OSError as error:
            log.warning(f"The {self._what} is not remembered: {error}.")

    def _prune(self, folder: Path) -> None:
        if self._most is not None:
            newest_first = sorted(folder.glob("*.json"), key=lambda p: -p.stat().st_mtime)
            for path in newest_first[self._most :]:
                path.unlink(missing_ok=True)

    def _path(self, facts: Mapping[str, Any]) -> Path | None:
        if self._folder is None:
            return None
        text = json.dumps(_plain(facts), sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _plain(facts: Mapping[str, Any]) -> Any:
    """As JSON gives it back, so that what was written equals what is read."""
    return json.loads(json.dumps(facts, default=str))
