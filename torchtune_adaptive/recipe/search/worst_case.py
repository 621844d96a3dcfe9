"""The worst case: the largest row that the data can produce, as many times as a micro-batch has rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchtune_adaptive.common import ConfigError, EmptyTrial, NothingFits, counted
from torchtune_adaptive.core import Ranks, SampleOrder, SizeTrial
from torchtune_adaptive.recipe.data.dataset import Data
from torchtune_adaptive.recipe.data.row_lengths import RowLengths
from torchtune_adaptive.recipe.data.rows import Row, RowSize, with_images
from torchtune_adaptive.recipe.settings.adaptive import BLOCK

MOST_ROWS_SCANNED = 100_000
MOST_SECONDS_SCANNED = 30.0
"""Limits of the scan for the largest row, on each rank: ranks share the work."""

_SECONDS_TO_JUDGE = 3.0
"""Seconds after which a scan gives up that cannot end in time, where the config has a bound."""


@dataclass(frozen=True)
class WorstCase:
    """A row as the dataset gives them, as large as a row can be."""

    row: Row
    source: str
    """The origin of its size, for the log."""
    data: Data
    """The data that the row is of."""

    @property
    def size(self) -> RowSize:
        return self.data.rows.size(self.row)

    @property
    def length(self) -> int:
        return self.size.tokens

    def batch(self, rows: int) -> dict[str, Any]:
        return self.data.collate([self.row] * rows)

    def of_length(self, length: int) -> WorstCase:
        """The same row, cut or repeated to another length."""
        return replace(self, row=self.data.rows.stretched(self.row, length))

    def nothing_fits(self, trial: SizeTrial) -> NothingFits:
        """Why not even one row can be trained, and what would change that."""
        return trial.nothing_fits(
            f"{self.data.rows.sample} of {self.size} ({self.source})",
            "Shorten the rows (tokenizer.max_seq_len), turn on enable_activation_checkpointing, use LoRA or "
            f"QLoRA, use more ranks, or allow more memory ({BLOCK}.memory_limit, {BLOCK}.headroom).",
        )


def worst_case(
    data: Data, probe_length: int | None, ranks: Ranks, lengths: RowLengths
) -> WorstCase:
    """Find the worst case: the longest row that exists or, where that takes too long to find out, the longest
    that the config allows. Text and images are as large as any row has them: batches are padded to both.

    Args:
        data: the data, with its tokenizer, which may bound the length.
        probe_length: the tokens to try, if the user has set them.
        ranks: the ranks that share the work.
        lengths: the lengths of the rows, where they have been looked up before.

    Raises:
        EmptyTrial: there is no row.
        ConfigError: a row is longer than ``probe_length``.
    """
    dataset, rows = data.dataset, data.rows
    if len(dataset) == 0:
        raise EmptyTrial(
            "The dataset is empty, so there is no row to try. Check the dataset's source."
        )
    if rows.packed:
        row = dataset[0]
        length = rows.length(row)
        require_no_longer(length, 0, probe_length)
        return WorstCase(rows.stretched(row, length), "packed rows are full", data)
    bound = _Bound.of(data)
    found = _known(lengths, rows.sample) or _scan(
        data, ranks, _enough(bound, probe_length), bound, lengths
    )
    require_no_longer(found.size.tokens, found.longest, probe_length)
    tokens, source = found.size.tokens, found.source(bound)
    if probe_length is not None:
        tokens, source = probe_length, f"{BLOCK}.probe_length"
    elif not found.complete and bound.tokens is not None:
        tokens = max(tokens, bound.tokens)
    row = rows.stretched(dataset[found.longest], tokens)
    if found.size.images:
        tiles = found.size.tiles if found.complete else max(found.size.tiles, bound.tiles)
        row = with_images(row, dataset[found.most_tiles], found.size.images, tiles)
    return WorstCase(row, source, data)


@dataclass(frozen=True)
class _Bound:
    """How large a row can be at most, as far as the config says it."""

    tokens: int | None
    tiles: int
    name: str

    @classmethod
    def of(cls, data: Data) -> _Bound:
        tiles = getattr(data.tokenizer, "max_num_tiles", None) or 0
        for owner, name in ((data.dataset, "the dataset"), (data.tokenizer, "the tokenizer")):
            if tokens := getattr(owner, "max_seq_len", None):
                return cls(tokens, tiles, f"max_seq_len of {name}")
        return cls(None, tiles, "")


@dataclass(frozen=True)
class _Largest:
    """The largest parts of all rows that were looked at, and the rows that have them."""

    size: RowSize
    longest: int
    most_tiles: int
    scanned: int
    rows: int
    sample: str

    @property
    def complete(self) -> bool:
        return self.scanned >= self.rows

    def source(self, bound: _Bound) -> str:
        if bound.tokens is not None and self.size.tokens >= bound.tokens:
            return f"{bound.name}, and there are {self.sample}s that long"
        if self.complete:
            allowed = "" if bound.tokens is None else f"; {bound.name} allows {bound.tokens:,}"
            longest = f"the longest of all {self.rows:,} {self.sample}s"
            return f"{f'the only {self.sample}' if self.rows == 1 else longest}{allowed}"
        some = f"{counted(self.scanned, self.sample)} out of {self.rows:,}"
        if bound.tokens is not None:
            return f"{bound.name}; looking at more than {some} takes too long"
        return (
            f"the longest of {some}; there may be a longer one: set tokenizer.max_seq_len, or "
            f"{BLOCK}.probe_length, to be sure"
        )


def _enough(bound: _Bound, probe_length: int | None) -> int | None:
    """The length of a row after which looking at more text says nothing new."""
    if probe_length is None:
        return bound.tokens
    none_is_longer = bound.tokens is not None and bound.tokens <= probe_length
    return 0 if none_is_longer else probe_length + 1


def _known(lengths: RowLengths, sample: str) -> _Largest | None:
    known = lengths.known()
    if known is None:
        return None
    at = int(known.argmax())
    return _Largest(RowSize(int(known[at])), at, 0, len(known), len(known), sample)


def _scan(
    data: Data, ranks: Ranks, enough: int | None, bound: _Bound, lengths: RowLengths
) -> _Largest:
    """Look at all rows, or at an even sample where there are too many.

    A row of the length ``enough`` makes looking at more text unnecessary. ``lengths`` keeps what was found.
    """
    dataset = data.dataset
    order = SampleOrder.to_look_at(len(dataset))
    mine = order.share(0, ranks.rank, ranks.size)[:MOST_ROWS_SCANNED].tolist()
    sizes = []
    for index in _in_time(mine, bound.tokens is not None):
        sizes.append(data.rows.size(dataset[index]))
        if enough is not None and sizes[-1].tokens >= enough and not sizes[-1].images:
            break
    nothing = (0, -mine[0] if mine else -len(dataset))
    longest = max(((s.tokens, -i) for s, i in zip(sizes, mine, strict=False)), default=nothing)
    tiled = max(((s.tiles, -i) for s, i in zip(sizes, mine, strict=False)), default=nothing)
    images = max((size.images for size in sizes), default=0)
    seen = ranks.gather((longest, tiled, images, len(sizes)))
    (tokens, at), (tiles, tiled_at) = max(s[0] for s in seen), max(s[1] for s in seen)
    size = RowSize(tokens, max(s[2] for s in seen), tiles)
    scanned = sum(s[3] for s in seen)
    found = _Largest(size, -at, -tiled_at, scanned, len(dataset), data.rows.sample)
    if found.complete and not size.images:
        shuffled = lengths.of_all((size.tokens for size in sizes), len(dataset))
        in_order = None
        if shuffled is not None:  # on rank 0
            in_order = np.empty_like(shuffled)
            in_order[np.asarray(order.epoch(0))] = shuffled
        lengths.keep(in_order)
    return found


def _in_time(indices: list[int], bounded: bool) -> Iterator[int]:
    """The rows to look at, until there is no time left for more."""
    started = time.monotonic()
    for done, index in enumerate(indices):
        taken = time.monotonic() - started
        if taken > MOST_SECONDS_SCANNED:
            return
        would_take = taken / max(done, 1) * len(indices)
        if bounded and taken > _SECONDS_TO_JUDGE and would_take > MOST_SECONDS_SCANNED:
            return
        yield index


def require_no_longer(length: int, row: int, probe_length: int | None) -> None:
    """Raise where a row is longer than the user wants tried."""
    if probe_length is not None and length > probe_length:
        raise ConfigError(
            f"{BLOCK}.probe_length",
            probe_length,
            f"is shorter than row {row} of the data ({length} tokens)",
            "Leave it out, or cut rows with tokenizer.max_seq_len",
        )
