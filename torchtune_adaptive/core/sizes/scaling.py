"""The learning rate of a batch that grows."""

from __future__ import annotations

import math
from typing import Literal

LrScaling = Literal["none", "sqrt", "linear", "gain"]


def lr_factor(
    rule: LrScaling, batch: int, start: int, noise: float | None = None, exponent: float = 0.5
) -> float:
    """The factor for the base learning rate at a global batch of ``batch``.

    Args:
        rule: ``none``; ``sqrt`` or ``linear`` in batch / start; or ``gain``, the value of a larger batch at
            this noise scale: (1 + noise / start) / (1 + noise / batch), to the power of ``exponent``.
        batch: the global batch.
        start: the global batch that the base learning rate is meant for.
        noise: the gradient noise scale in rows; while it is unknown, ``gain`` is 1.
        exponent: 0.5 for Adam and similar optimizers, 1 for SGD.
    """
    ratio = batch / start
    if rule == "sqrt":
        return math.sqrt(ratio)
    if rule == "linear":
        return ratio
    if rule == "gain" and noise is not None:
        return float(((1 + noise / start) / (1 + noise / batch)) ** exponent)
    return 1.0
