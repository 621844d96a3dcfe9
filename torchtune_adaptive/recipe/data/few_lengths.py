"""Rounded lengths of batches, so that few shapes of micro-batches occur.

With tensor parallelism the collectives of each shape are recorded, twice. If nearly every micro-batch had a
length of its own, nearly every one would be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.nn.functional as F

from torchtune_adaptive.recipe.data.split_rows import Length
from torchtune_adaptive.recipe.settings.asked import Asked

_BETWEEN_DOUBLINGS = 32
"""The number of lengths from one power of two to the next: 1 % of the tokens are added on average, and from
2k to 128k tokens there are 192 lengths."""
_LEAST = 8
"""Tokens of which lengths are multiples, as matrix products like it."""
_KNOWN = {"tokens", "labels", "encoder_input", "encoder_mask"}
"""The keys of batches that can be padded."""


@dataclass(frozen=True)
class FewLengths:
    """The lengths that batches may have."""

    longest: int | None = None
    """The tokens in a row that the tokenizer or the model allows, if the config says so."""

    @classmethod
    def of(cls, asked: Asked) -> FewLengths | None:
        """Those of a run; None where nothing is recorded for each shape, and where rows are all full. A run
        that leaves its batch as it is has torchtune's lengths, and so torchtune's losses to the bit."""
        if asked.holders == 1 or not asked.settings.adapts or asked.packed():
            return None
        blocks = (asked.cfg.get("tokenizer") or {}, asked.cfg.get("model") or {})
        limits = [int(limit) for block in blocks if (limit := block.get("max_seq_len"))]
        return cls(min(limits, default=None))

    def padded(self, length: Length) -> Length:
        """The length of a batch whose longest row has so many tokens, never more than what is allowed; of
        several, those of each."""
        _, bits = np.frexp(length)
        step = np.maximum(_LEAST, (1 << bits) // (2 * _BETWEEN_DOUBLINGS))
        rounded = -(-length // step) * step
        if self.longest is not None:
            rounded = np.maximum(length, np.minimum(rounded, self.longest))
        return int(rounded) if isinstance(length, int) else rounded.astype(length.dtype)


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
