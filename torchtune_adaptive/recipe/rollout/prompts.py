"""The rows of reinforcement learning: prompts, from which the rows of a batch are generated."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch

from torchtune_adaptive.recipe.data.rows import Collate, Row, Rows
from torchtune_adaptive.recipe.rollout.rows import collate, longest_rows
from torchtune_adaptive.recipe.settings.asked import Asked


class Prompts(Rows):
    """Prompts. Batches are not made of them, but of the rows that are generated from them."""

    sample = "prompt"
    keys: ClassVar[tuple[str, ...]] = ("tokens", "answer")
    values: ClassVar[bool] = False
    """Whether the rows that are generated from them have values."""

    def length(self, row: Row) -> int:
        return len(row["tokens"])

    def stretched(self, row: Row, length: int) -> Row:
        return {**row, "tokens": (list(row["tokens"]) * length)[:length]}

    def collate(self, asked: Asked, tokenizer: Any, objective: Any) -> Collate:
        return partial(collate, padding_id=tokenizer.pad_id)

    def imagined(self, rows: int, length: int, simulated: bool) -> dict[str, torch.Tensor]:
        # Of a row that is generated, only the length of all of it counts.
        return collate(longest_rows(rows, length - 1, 1, self.values), padding_id=0)
