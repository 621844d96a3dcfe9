"""What a training step minimizes: the loss that the user's function returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from torchtune_adaptive.core import Batch, Forward, Summed
from torchtune_adaptive.library import usage as checks


class SummedLoss:
    """The user's function as an objective."""

    ignored = -100
    unit = "terms"
    metrics: Sequence[str] = ()

    def __init__(self, forward: Callable[[Any], Any], frozen: Sequence[nn.Module]) -> None:
        self._forward = forward
        self._checked = False
        self.frozen: Sequence[nn.Module] = tuple(frozen)

    def rows(self, batch: Batch) -> int:
        return checks.rows_in(batch)

    def weight(self, batch: Batch) -> int:
        return 0

    def summed_loss(self, forward: Forward, batch: Batch, weight: int) -> Summed:
        loss, weight = checks.weighted(self._forward(batch))
        if not self._checked and weight > 1:
            checks.require_sum(loss, weight)
            self._checked = True
        return Summed(loss, weight)
