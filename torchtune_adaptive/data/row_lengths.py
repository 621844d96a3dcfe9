"""How many tokens each row has: looked up once, by all ranks together, and cached."""

from __future__ import annotations

import logging
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from torchtune_adaptive.cache import Cache, cache_folder
from torchtune_adaptive.ranks.agreement import Ranks

log = logging.getLogger(__name__)

_SPOT_CHECKS = 64
"""Rows that are looked up again before cached lengths are used."""


def row_lengths(
    dataset: Any, cfg: DictConfig, ranks: Ranks, cache: bool | str, say_progress: bool
) -> list[int]:
    """The number of tokens of every row.

    Args:
        dataset: rows by index.
        cfg: the run's; what it says about the dataset and the tokenizer is what lengths are cached under.
        ranks: the ranks that share the work.
        cache: the run's setting: where to cache them.
        say_progress: show a progress bar.
    """
    cached, facts = _cached(cache), _facts(dataset, cfg)
    known = None
    if ranks.rank == 0:
        known = cached.get(facts)
        if known is not None and (reason := _stale(known, dataset)):
            log.warning(f"Ignoring cached row lengths: {reason}; recomputing.")
            known = None
    known = ranks.from_rank_zero(known)  # ranks with different caches would diverge
    if known is not None:
        log.info(f"Row lengths: {len(known):,} from the cache.")
        return known
    mine = range(ranks.rank, len(dataset), ranks.size)
    bar = tqdm(mine, desc="row lengths", unit=" rows", disable=not say_progress)
    found = ranks.gather([_length(dataset, index) for index in bar])
    lengths = [0] * len(dataset)
    for rank, some in enumerate(found):
        lengths[rank :: ranks.size] = some
    if ranks.rank == 0:
        cached.put(facts, lengths)
    return lengths


def _length(dataset: Any, index: int) -> int:
    return len(dataset[index]["tokens"])


def _cached(cache: bool | str) -> Cache[list[int]]:
    return Cache(cache_folder(cache, "row_lengths"), "row lengths", _are_lengths)


def _are_lengths(value: Any) -> bool:
    return isinstance(value, list) and all(type(length) is int for length in value)


def _facts(dataset: Any, cfg: DictConfig) -> dict[str, Any]:
    """What decides how many tokens each row has."""
    # The whole config: a part of it, put elsewhere, could not look up what it refers to (``${assets}``).
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    return {
        "dataset": config["dataset"],
        "tokenizer": config["tokenizer"],
        # Hugging Face's own name for what a dataset holds, where there is one.
        "fingerprint": getattr(getattr(dataset, "_data", None), "_fingerprint", None),
        "rows": len(dataset),
    }


def _stale(lengths: list[int], dataset: Any) -> str | None:
    """Why cached lengths cannot be of this dataset, by a spot check of a few rows."""
    if len(lengths) != len(dataset):
        return f"there are {len(lengths)}, but the dataset has {len(dataset)} rows"
    for index in range(0, len(dataset), max(1, len(dataset) // _SPOT_CHECKS)):
        if (now := _length(dataset, index)) != lengths[index]:
            return f"row {index} had {lengths[index]} tokens and now has {now}"
    return None
