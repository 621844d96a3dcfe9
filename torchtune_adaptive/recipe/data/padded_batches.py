"""Batches that are longer than their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from torchtune_adaptive.recipe.data.few_lengths import FewLengths

_KNOWN = {"tokens", "labels", "encoder_input", "encoder_mask"}
"""The keys of batches that can be padded."""


def collate_padded(
    collate: Callable[[list[Any]], dict[str, Any]],
    padded: Callable[[int], int],
    padding: int,
    ignored: int,
    rows: list[Any],
) -> dict[str, Any]:
    """A batch of rows, padded to the length that ``padded`` gives for theirs. What the model sees of the rows
    does not change: what is added comes after them, and is not trained on."""
    batch = collate(rows)
    missing = padded(batch["tokens"].shape[-1]) - batch["tokens"].shape[-1]
    if missing > 0:
        batch["tokens"] = F.pad(batch["tokens"], (0, missing), value=padding)
        batch["labels"] = F.pad(batch["labels"], (0, missing), value=ignored)
        if "encoder_mask" in batch:
            batch["encoder_mask"] = F.pad(batch["encoder_mask"], (0, 0, 0, missing))
    return batch


def collate_few(
    collate: Callable[[list[Any]], dict[str, Any]],
    lengths: FewLengths,
    padding: int,
    ignored: int,
    rows: list[Any],
) -> dict[str, Any]:
    """A batch of one of few lengths, if it has nothing but what is known: a user's own collate function may
    make masks as well."""
    batch = collate(rows)
    if batch.keys() - _KNOWN:
        return batch
    return collate_padded(lambda _: batch, lengths.padded, padding, ignored, rows)
