"""Rounded lengths of batches, so that few shapes of micro-batches occur. Without torch: a plan asks for them.

With tensor parallelism the collectives of each shape are recorded, twice. If nearly every micro-batch had a
length of its own, nearly every one would be recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from torchtune_adaptive.recipe.settings.asked import Asked

_BETWEEN_DOUBLINGS = 32
"""The number of lengths from one power of two to the next: 1 % of the tokens are added on average, and from
2k to 128k tokens there are 192 lengths."""
_LEAST = 8
"""Tokens of which lengths are multiples, as matrix products like it."""

Length = TypeVar("Length", int, npt.NDArray[np.int32])


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
