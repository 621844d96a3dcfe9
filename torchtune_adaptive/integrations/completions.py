"""Completions as rows: taken out of the batches in which they were generated, and put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchtune_adaptive.common import UsageError


@dataclass(frozen=True)
class Completion:
    """A row of a batch of completions."""

    batch: Mapping[str, Any]
    """The batch, on the host: tensors with a row for each completion, and numbers for all of them."""
    row: int


def rows_of(batch: Mapping[str, Any]) -> list[Completion]:
    """The completions in a batch."""
    for name, value in batch.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{name}: a {type(value).__name__} in a batch of completions cannot be split into rows. Only "
                "prompts of text are supported."
            )
    kept = {name: value if value is None else value.detach().cpu() for name, value in batch.items()}
    ids: torch.Tensor = batch["completion_ids"]
    return [Completion(kept, row) for row in range(len(ids))]


def together(rows: Sequence[Completion]) -> dict[str, Any]:
    """A batch of completions that were generated together, so that they are equally long."""
    return {
        name: value
        if value is None or not value.dim()
        else torch.stack([each.batch[name][each.row] for each in rows])
        for name, value in rows[0].batch.items()
    }


def longest(like: Completion, prompt: int, completion: int) -> Completion:
    """A completion that has as many tokens as there may be, in the prompt and after it."""
    width = like.batch["completion_ids"].size(1)

    def widened(name: str, value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None or not value.dim():
            return value
        if value.dim() == 1 or (value.size(1) != width and not name.startswith("prompt")):
            return value[:1]
        # Masks of ones and tokens of number 1, none of which is padding; log-probabilities of 0.
        tokens = prompt if name.startswith("prompt") else completion
        return value.new_full((1, tokens), not value.is_floating_point())

    return Completion({name: widened(name, value) for name, value in like.batch.items()}, 0)
