"""How many tokens each row has: looked up once, by all ranks together, and remembered."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from torchtune_adaptive.cache import cache_folder
from torchtune_adaptive.ranks.agreement import Ranks

log = logging.getLogger(__name__)

_SPOT_CHECKS = 64
"""Rows that are looked up again before remembered lengths are believed."""


def row_lengths(
    dataset: Any, cfg: DictConfig, ranks: Ranks, cache: bool | str, say_progress: bool
) -> list[int]:
    """The tokens of every row.

    Args:
        dataset: by index.
        cfg: the config of the run, whose dataset and tokenizer are the key of the cache.
        ranks: that share the work.
        cache: the run's setting: where to keep them.
        say_progress: show a progress bar.
    """
    path = _path(dataset, cfg, cache)
    # From rank 0, or ranks with other caches would part ways.
    known = ranks.from_rank_zero(_read(path, dataset) if ranks.rank == 0 else None)
    if known is not None:
        log.info(f"Row lengths: {len(known):,} remembered in {path}.")
        return known
    mine = range(ranks.rank, len(dataset), ranks.size)
    bar = tqdm(mine, desc="row lengths", unit=" rows", disable=not say_progress)
    found = ranks.gather([_length(dataset, index) for index in bar])
    lengths = [0] * len(dataset)
    for rank, some in enumerate(found):
        lengths[rank :: ranks.size] = some
    if ranks.rank == 0:
        _write(path, lengths)
    return lengths


def _length(dataset: Any, index: int) -> int:
    return len(dataset[index]["tokens"])


def _path(dataset: Any, cfg: DictConfig, cache: bool | str) -> Path | None:
    folder = cache_folder(cache, "row_lengths")
    if folder is None:
        return None
    about = {
        "dataset": OmegaConf.to_container(OmegaConf.create({"_": cfg.dataset}), resolve=True),
        "tokenizer": OmegaConf.to_container(cfg.tokenizer, resolve=True),
        # Hugging Face's own name for what a dataset holds, where there is one.
        "fingerprint": getattr(getattr(dataset, "_data", None), "_fingerprint", None),
        "rows": len(dataset),
    }
    text = json.dumps(about, sort_keys=True, default=str)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.npy"


def _read(path: Path | None, dataset: Any) -> list[int] | None:
    """What is remembered, if a few rows looked up again bear it out."""
    if path is None or not path.exists():
        return None
    try:
        lengths: list[int] = np.load(path, allow_pickle=False).tolist()
        if len(lengths) != len(dataset):
            raise ValueError(f"it has {len(lengths)} rows, and the dataset {len(dataset)}")
        for index in range(0, len(dataset), max(1, len(dataset) // _SPOT_CHECKS)):
            if (now := _length(dataset, index)) != lengths[index]:
                raise ValueError(f"row {index} had {lengths[index]} tokens and has {now}")
    except (OSError, ValueError, EOFError) as error:
        log.warning(f"Not using the row lengths in {path}: {error}. Looking them up again.")
        return None
    return lengths


def _write(path: Path | None, lengths: list[int]) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            np.save(file, np.array(lengths, dtype=np.int32))
        os.replace(file.name, path)
    except OSError as error:
        log.warning(f"The row lengths are not remembered: {error}.")
