"""How many tokens each row has: looked up once, by all ranks together, and cached."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig

from torchtune_adaptive.common import counted, launcher
from torchtune_adaptive.recipe.data.length_files import (
    LengthFile,
    LengthFiles,
    Lengths,
    facts_of_config,
)
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
        self._files = LengthFiles(cache)
        self._facts = lambda: _facts(dataset, cfg)
        self._lengths: Lengths | None = None

    def known(self) -> Lengths | None:
        """The lengths, if they have been looked up before."""
        if self._lengths is not None:
            return self._lengths
        known = None
        if self._ranks.is_zero:
            known = self._files.get(self._facts())
            if known is not None and (reason := _stale(known[1], self._dataset, self._length)):
                log.warning(f"Ignoring cached row lengths: {reason}; recomputing.")
                known = None
        self._lengths = self._shared(known)  # or different caches would diverge
        if self._lengths is not None:
            log.info(f"Row lengths: {len(self._lengths):,} from the cache.")
        return self._lengths

    def keep(self, lengths: Lengths | None) -> Lengths:
        """Remember lengths that have been looked up elsewhere, given on rank 0."""
        kept = self._shared(lengths if lengths is None else self._files.put(self._facts(), lengths))
        self._lengths = kept
        assert kept is not None, "rank 0 has them"
        return kept

    def all(self, say_progress: bool) -> Lengths:
        """The lengths, looked up if need be; with a progress bar if ``say_progress``."""
        if (known := self.known()) is not None:
            return known
        rank, ranks, rows = self._ranks.rank, self._ranks.size, len(self._dataset)
        from tqdm import tqdm

        mine = range(rank, rows, ranks)
        bar = tqdm(mine, desc="row lengths", unit=" rows", disable=not say_progress)
        return self.keep(self.of_all(map(self._length, map(self._dataset.__getitem__, bar)), rows))

    def of_all(self, mine: Iterable[int], rows: int) -> Lengths | None:
        """All lengths on rank 0, of which each rank has looked up every n-th."""
        share = torch.zeros(-(-rows // self._ranks.size), dtype=torch.int32)
        numbers = share.numpy()  # the same memory
        for place, length in enumerate(mine):
            numbers[place] = length
        found = self._ranks.gather_tensor(share)
        return None if found is None else found.T.flatten()[:rows].numpy()

    def _shared(self, kept: tuple[LengthFile, Lengths] | None) -> Lengths | None:
        """Rank 0's lengths on every rank: in a file that the ranks of a machine map, or in memory."""
        ranks, files = self._ranks, self._files
        file = ranks.from_rank_zero(kept and kept[0])
        if file is None:
            return None
        mine = kept[1] if kept else files.mapped(file)
        if not ranks.any(mine is None):
            return mine
        # As on another machine, whose cache is another one.
        sent = torch.empty(file.rows, dtype=torch.int32)
        if ranks.is_zero:
            sent.numpy()[:] = mine
        ranks.fill_from_rank_zero(sent)
        if mine is None and launcher.local_rank() == 0:
            files.write(file, sent.numpy())
        ranks.any(False)  # until it is written
        mine = files.mapped(file) if mine is None else mine
        return sent.numpy() if mine is None else mine


def _facts(dataset: Any, cfg: DictConfig) -> dict[str, Any]:
    """What decides how many tokens each row has."""
    return {**facts_of_config(cfg), "fingerprint": fingerprint(dataset), "rows": len(dataset)}


def _stale(lengths: Lengths, dataset: Any, length: Callable[[Any], int]) -> str | None:
    """Why cached lengths cannot be of this dataset, by a spot check of a few rows."""
    if len(lengths) != len(dataset):
        return f"there are {len(lengths)}, but the dataset has {counted(len(dataset), 'row')}"
    for index in range(0, len(dataset), max(1, len(dataset) // _SPOT_CHECKS)):
        if (now := length(dataset[index])) != lengths[index]:
            return f"row {index} had {lengths[index]} tokens and now has {now}"
    return None
