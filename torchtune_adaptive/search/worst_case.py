"""The worst case: the longest row that the data can produce, as many times as a micro-batch has rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchtune_adaptive.errors import EmptyTrial
from torchtune_adaptive.ranks.agreement import Ranks

MOST_ROWS_SCANNED = 50_000

MOST_SECONDS_SCANNED = 30.0
"""Limits of the scan for the longest row, per rank and in all: ranks share the work."""
Row = dict[str, Any]


@dataclass(frozen=True)
class WorstCase:
    """A row as the dataset gives them, as long as a row can be."""

    row: Row
    length: int
    source: str
    """Where the length comes from, for the log."""

    def batch(self, rows: int, collate: Callable[[list[Row]], dict[str, Any]]) -> dict[str, Any]:
        return collate([self.row] * rows)

    def of_length(self, length: int) -> WorstCase:
        """The same row, cut or repeated to another length."""
        return _stretched(self.row, length, self.source)


def worst_case(
    dataset: Any, tokenizer: Any, packed: bool, probe_length: int | None, ranks: Ranks
) -> WorstCase:
    """Find the worst case: by packed rows, ``probe_length``, ``max_seq_len``, or a scan, in this order."""
    if len(dataset) == 0:
        raise EmptyTrial(
            "The dataset is empty, so there is no row to try. Check the dataset's source."
        )
    if packed:
        row = dataset[0]
        return WorstCase(_all_trained(row), len(row["tokens"]), "packed rows are full")
    if probe_length is not None:
        return _stretched(dataset[0], probe_length, "adaptive_batching.probe_length")
    for owner, name in ((dataset, "the dataset"), (tokenizer, "the tokenizer")):
        if length := getattr(owner, "max_seq_len", None):
            return _stretched(dataset[0], length, f"max_seq_len of {name}")
    return _longest(dataset, ranks)


def _longest(dataset: Any, ranks: Ranks) -> WorstCase:
    """The longest row there is, or the longest of an even sample where there are too many."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
    mine = order[: MOST_ROWS_SCANNED * ranks.size][ranks.rank :: ranks.size]
    longest, index, scanned = 0, order[0], 0
    end = time.monotonic() + MOST_SECONDS_SCANNED
    for candidate in mine:
        if time.monotonic() > end:
            break
        scanned += 1
        length = len(dataset[candidate]["tokens"])
        if length > longest:
            longest, index = length, candidate
    found = ranks.gather((longest, -index, scanned))
    longest, index, _ = max(found)
    total = sum(count for *_, count in found)
    if total >= len(dataset):
        source = f"the longest of all {total:,} rows"
    else:
        source = (
            f"the longest of {total:,} rows out of {len(dataset):,}; there may be a longer one: "
            "set tokenizer.max_seq_len, or adaptive_batching.probe_length, to be sure"
        )
    return WorstCase(_all_trained(dataset[-index]), longest, source)


def _stretched(row: Row, length: int, source: str) -> WorstCase:
    """A row cut or repeated to ``length`` tokens, in everything that goes with its tokens."""
    tokens = len(row["tokens"])

    def stretch(value: Any) -> Any:
        copies = -(-length // tokens)
        if isinstance(value, torch.Tensor) and value.shape == (tokens,):
            return value.repeat(copies)[:length]
        if isinstance(value, (list, tuple)) and len(value) == tokens:
            return (list(value) * copies)[:length]
        return value

    return WorstCase(_all_trained({k: stretch(v) for k, v in row.items()}), length, source)


def _all_trained(row: Row) -> Row:
    """No token is masked, so that a cut row never leaves a trial with nothing to train on."""
    return {**row, "labels": row["tokens"]}
