"""Rows that are split along their sequence, of which each rank has a part, as in context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.recipe.data.few_lengths import Length


@dataclass(frozen=True)
class RowParts:
    """The part of each row that a rank has: some of the pieces, of equal length, into which rows are cut.
    torch chooses them so that each rank has as much to do: attention has less at the front of a row."""

    ranks: int
    """The ranks that have the parts of a row."""
    pieces: tuple[int, ...]
    """The pieces of this rank, by their number in the row."""
    multiple: int
    """Rows are padded to a multiple of so many tokens."""

    def padded(self, length: Length) -> Length:
        """The length of a batch whose longest row has so many tokens; of several, those of each."""
        return -(-length // self.multiple) * self.multiple

    def positions(self, length: int) -> torch.Tensor:
        """The places of this rank's tokens in a row of a padded length."""
        pieces = torch.arange(length).chunk(len(self.pieces) * self.ranks)
        return torch.cat([pieces[number] for number in self.pieces])


@dataclass(frozen=True)
class CollateParts:
    """Makes batches of a rank's part of each row. Labels are shifted before that: the token that follows the
    last one of a piece may be another rank's."""

    collate: Callable[[list[Any]], dict[str, Any]]
    """How whole rows become a batch."""
    parts: RowParts
    padding: int
    """The token after the end of a row."""
    ignored: int
    """Its label."""
    shifted: bool
    """Whether the labels of whole rows are the tokens that come next already."""

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        batch = self.collate(rows)
        if other := sorted(batch.keys() - {"tokens", "labels"}):
            raise ConfigError(
                "collate_fn",
                self.collate,
                f"makes {', '.join(other)}, and context parallelism splits tokens and labels only",
                "Set context_parallel_dim=1, or use torchtune.data.padded_collate_sft",
            )
        tokens, labels = batch["tokens"], batch["labels"]
        if not self.shifted:
            labels = F.pad(labels[:, 1:], (0, 1), value=self.ignored)
        missing = self.parts.padded(tokens.shape[1]) - tokens.shape[1]
        mine = self.parts.positions(tokens.shape[1] + missing)
        return {
            "tokens": F.pad(tokens, (0, missing), value=self.padding)[:, mine],
            "labels": F.pad(labels, (0, missing), value=self.ignored)[:, mine],
            "input_pos": mine.repeat(len(tokens), 1),
        }
