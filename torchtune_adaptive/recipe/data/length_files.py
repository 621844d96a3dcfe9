"""Row lengths in the cache: arrays in files that all ranks of a machine map, so that none holds them.

Without torch: a plan asks for the longest row.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from omegaconf import DictConfig

from torchtune_adaptive.common import Cache, atomically, cache_folder, keep_private
from torchtune_adaptive.recipe.settings.secrets import facts_of

log = logging.getLogger(__name__)

Lengths: TypeAlias = npt.NDArray[np.int32]
_WHAT = "row lengths"
_HASHED_AT_ONCE = 1 << 22  # lengths


class LengthFile(NamedTuple):
    """What is known of a file before it is opened."""

    name: str
    rows: int
    checksum: int


class LengthFiles:
    """The files of a cache folder; without one, nothing is kept.

    What decides about the lengths (the facts) stands in a file of the cache, with the checksum of the array,
    which is a part of the array's name. So files of one name are alike on all machines, and one that a rank
    has mapped is never replaced by another.
    """

    def __init__(self, cache: bool | str) -> None:
        self._cache: Cache[Any] = Cache(cache_folder(cache, "row_lengths"), _WHAT, _is_description)

    def get(self, facts: Mapping[str, Any]) -> tuple[LengthFile, Lengths] | None:
        """The lengths that are cached under exactly these facts."""
        kept = self._cache.get(facts)
        if kept is None:
            return None
        if isinstance(kept, list):  # as version 0.2.0 has cached them
            return self.put(facts, np.array(kept, dtype=np.int32))
        file = LengthFile(self._name(facts, kept["checksum"]), kept["rows"], kept["checksum"])
        found = self.mapped(file)
        if found is None:
            log.warning(
                f"The file of cached {_WHAT} {file.name} is missing or damaged; recomputing."
            )
            return None
        return file, found

    def mapped(self, file: LengthFile) -> Lengths | None:
        """The lengths in a file, which stay there; None where it cannot be read, or is damaged."""
        if self._cache.folder is None:
            return None
        path = self._cache.folder / file.name
        try:
            found = np.load(path, mmap_mode="r")
            if found.dtype != np.int32 or found.shape != (file.rows,):
                raise ValueError(f"it has {found.dtype} of shape {found.shape}")
            if _checksum(found) != file.checksum:
                raise ValueError("it does not match its checksum")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, EOFError, AttributeError) as error:  # the last of an archive
            log.warning(f"Ignoring cached {_WHAT} in {path}: {error}.")
            return None
        return found

    def write(self, file: LengthFile, lengths: Lengths) -> bool:
        """Write a file; whether it is there then."""
        if self._cache.folder is None:
            return False
        try:
            keep_private(self._cache.folder)
            with (
                atomically(self._cache.folder / file.name) as temporary,
                temporary.open("wb") as to,
            ):
                np.save(to, lengths)
        except OSError as error:
            self._cache.give_up(error)
            return False
        return True

    def put(self, facts: Mapping[str, Any], lengths: Lengths) -> tuple[LengthFile, Lengths]:
        """Keep lengths under the facts that they are of; gives them as they are kept."""
        file = self._file(facts, lengths)
        kept = self.mapped(file)
        if kept is None and self.write(file, lengths):
            kept = self.mapped(file)
        if kept is None:
            return file, lengths
        longest = int(lengths.max(initial=0))
        about = {"rows": file.rows, "longest": longest, "checksum": file.checksum}
        self._cache.put(facts, about)
        return file, kept

    def longest(self) -> Iterator[tuple[dict[str, Any], int]]:
        """The length of the longest row under all facts that there are."""
        for facts, kept in self._cache.all():
            yield facts, max(kept, default=0) if isinstance(kept, list) else kept["longest"]

    def _file(self, facts: Mapping[str, Any], lengths: Lengths) -> LengthFile:
        checksum = _checksum(lengths)
        return LengthFile(self._name(facts, checksum), len(lengths), checksum)

    @staticmethod
    def _name(facts: Mapping[str, Any], checksum: int) -> str:
        return str(Path(Cache.file_name(facts)).with_suffix(f".{checksum:08x}.npy"))


def longest_known(cfg: DictConfig, cache: bool | str) -> int | None:
    """The longest row of the config's dataset with its tokenizer, if an earlier run has cached it."""
    facts = facts_of_config(cfg)
    found = [
        longest for known, longest in LengthFiles(cache).longest() if facts.items() <= known.items()
    ]
    return max(filter(None, found), default=None)


def facts_of_config(cfg: DictConfig) -> dict[str, Any]:
    """What a config says about the number of tokens of each row."""
    # The whole config: a part of it, put elsewhere, could not look up what it refers to (``${assets}``).
    config = facts_of(cfg)
    return {block: config.get(block) for block in ("dataset", "tokenizer")}


def _is_description(value: Any) -> bool:
    numbers = value
    if isinstance(value, dict):
        numbers = [value.get(name) for name in ("rows", "longest", "checksum")]
    return isinstance(numbers, list) and all(type(number) is int for number in numbers)


def _checksum(lengths: Lengths) -> int:
    checksum = 0
    for at in range(0, len(lengths), _HASHED_AT_ONCE):
        checksum = zlib.crc32(lengths[at : at + _HASHED_AT_ONCE].data, checksum)
    return checksum
