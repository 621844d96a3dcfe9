"""How many tokens each row has: looked up once, by all ranks together, and cached."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import Cache, cache_folder, counted
from torchtune_adaptive.recipe.private import fingerprint

if TYPE_CHECKING:
    from torchtune_adaptive.core import Ranks

log = logging.getLogger(__name__)

_SPOT_CHECKS = 64
"""Rows that are looked up again before cached lengths are used."""


class RowLengths:
    """The number of tokens of every row of a dataset, as far as it has been looked up.

    Args:
        dataset: rows by index.
        cfg: the run's; what it says about the dataset and the tokenizer is what lengths are cached under.
        ranks: the ranks that share the work; each method is called on all of them.
        cache: the run's setting: where to cache them.
        length: a function that gives the length of a row.
    """

    def __init__(
        self,
        dataset: Any,
        cfg: DictConfig,
        ranks: Ranks,
        cache: bool | str,
        length: Callable[[Any], int] = lambda row: len(row["tokens"]),
    ) -> None:
        self._length = length
        self._dataset = dataset
        self._ranks = ranks
        self._cached = _cached(cache)
        self._facts = lambda: _facts(dataset, cfg)
        self._lengths: list[int] | None = None

    def known(self) -> list[int] | None:
        """The lengths, if they have been looked up before."""
        if self._lengths is not None:
            return self._lengths
        known = None
        if self._ranks.is_zero:
            known = self._cached.get(self._facts())
            if known is not None and (reason := _stale(known, self._dataset, self._length)):
                log.warning(f"Ignoring cached row lengths: {reason}; recomputing.")
                known = None
        self._lengths = self._ranks.from_rank_zero(known)  # or different caches would diverge
        if self._lengths is not None:
            log.info(f"Row lengths: {len(self._lengths):,} from the cache.")
        return self._lengths

    def keep(self, lengths: list[int]) -> None:
        """Remember lengths that have been looked up elsewhere."""
        self._lengths = lengths
        if self._ranks.is_zero:
            self._cached.put(self._facts(), lengths)

    def all(self, say_progress: bool) -> list[int]:
        """The lengths, looked up if need be; with a progress bar if ``say_progress``."""
        if (known := self.known()) is not None:
            return known
        rank, ranks, rows = self._ranks.rank, self._ranks.size, len(self._dataset)
        from tqdm import tqdm

        mine = range(rank, rows, ranks)
        bar = tqdm(mine, desc="row lengths", unit=" rows", disable=not say_progress)
        found = self._ranks.gather([self._length(self._dataset[index]) for index in bar])
        lengths = [0] * rows
        for rank, some in enumerate(found):
            lengths[rank::ranks] = some
        self.keep(lengths)
        return lengths


def longest_known(cfg: DictConfig, cache: bool | str) -> int | None:
    """The longest row of the config's dataset with its tokenizer, if an earlier run has cached it."""
    facts = _facts_of_config(cfg)
    found = [
        max(lengths)
        for known, lengths in _cached(cache).all()
        if lengths and facts.items() <= known.items()
    ]
    return max(found, default=None)


def _cached(cache: bool | str) -> Cache[list[int]]:
    return Cache(cache_folder(cache, "row_lengths"), "row lengths", _are_lengths)


def _are_lengths(value: Any) -> bool:
    return isinstance(value, list) and all(type(length) is int for length in value)


def _facts(dataset: Any, cfg: DictConfig) -> dict[str, Any]:
    """What decides how many tokens each row has."""
    return {**_facts_of_config(cfg), "fingerprint": fingerprint(dataset), "rows": len(dataset)}


def _facts_of_config(cfg: DictConfig) -> dict[str, Any]:
    # The whole config: a part of it, put elsewhere, could not look up what it refers to (``${assets}``).
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    return {block: config.get(block) for block in ("dataset", "tokenizer")}


def _stale(lengths: list[int], dataset: Any, length: Callable[[Any], int]) -> str | None:
    """Why cached lengths cannot be of this dataset, by a spot check of a few rows."""
    if len(lengths) != len(dataset):
        return f"there are {len(lengths)}, but the dataset has {counted(len(dataset), 'row')}"
    for index in range(0, len(dataset), max(1, len(dataset) // _SPOT_CHECKS)):
        if (now := length(dataset[index])) != lengths[index]:
            return f"row {index} had {lengths[index]} tokens and now has {now}"
    return None
