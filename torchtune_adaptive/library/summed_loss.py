"""The objective of a step of the library: what the user's ``forward`` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core import Batch, Forward, Summed
from torchtune_adaptive.library import checks


class SummedLoss:
    """The objective of a step: the loss that the user's function returns; ``frozen`` are models that it runs
    besides the trained one. With ``shares`` it returns shares of the loss, which have no number of terms, and
    are refused where ranks have different numbers of rows."""

    ignored = -100
    unit = "terms"
    metrics: Sequence[str] = ()

    def __init__(
        self,
        forward: Callable[[Any], Any],
        frozen: Sequence[nn.Module],
        shares: bool = False,
    ) -> None:
        self._forward = forward
        self._checked = False
        self.shares = shares
        self.begins = True
        """Whether the next micro-batch is the first of an attempt."""
        self.equal_rows = True
        """Whether all ranks have as many rows."""
        self.unequal_rows = False
        """Whether ranks may have different numbers of rows: shares are then no means over one rank's."""
        self.frozen: Sequence[nn.Module] = tuple(frozen)

    def rows(self, batch: Batch) -> int:
        return checks.rows_in(batch)

    def weight(self, batch: Batch) -> int:
        return 0

    def summed_loss(self, forward: Forward, batch: Batch, weight: int) -> Summed:
        result = self._forward(batch)
        if self.shares:
            return self._share(result)
        loss, weight = checks.weighted(result)
        if not self._checked and weight > 1:
            checks.require_sum(loss, weight)
            self._checked = True
        return Summed(loss, weight)

    def _share(self, result: object) -> Summed:
        if not isinstance(result, torch.Tensor):
            raise UsageError(
                f"forward: returned {checks.kind(result)}, but with shares must return one tensor, its share "
                "of the loss."
            )
        if not self.equal_rows and not self.unequal_rows:
            raise UsageError(
                "rows: some ranks have more than others, and forward returns a share of the loss, which is "
                "averaged over ranks. Return the sum over all terms, and their number; or give each rank as "
                "many rows."
            )
        # One for each rank: a step divides by the sum of the weights, so this makes the mean over ranks.
        return Summed(checks.differentiable(result), int(self.begins))
