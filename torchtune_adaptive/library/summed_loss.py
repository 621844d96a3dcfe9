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
    besides the trained one. A share of the loss is refused where gradient noise is measured, and where ranks
    have different numbers of rows."""

    ignored = -100
    unit = "terms"
    metrics: Sequence[str] = ()

    def __init__(
        self,
        forward: Callable[[Any], Any],
        frozen: Sequence[nn.Module],
        measures_noise: bool = False,
    ) -> None:
        self._forward = forward
        self._measures_noise = measures_noise
        self._checked = False
        self.shares: bool | None = None
        """Whether the function returns shares, which have no number of terms; None before the first."""
        self.begins = True
        """Whether the next micro-batch is the first of an attempt."""
        self.equal_rows = True
        """Whether all ranks have as many rows."""
        self.frozen: Sequence[nn.Module] = tuple(frozen)

    def rows(self, batch: Batch) -> int:
        return checks.rows_in(batch)

    def weight(self, batch: Batch) -> int:
        return 0

    def summed_loss(self, forward: Forward, batch: Batch, weight: int) -> Summed:
        result = self._forward(batch)
        shares = isinstance(result, torch.Tensor)
        if self.shares is None:
            self.shares = shares
        if shares != self.shares:
            before = "a tensor" if self.shares else "two values"
            raise UsageError(
                f"forward: returned {checks.kind(result)}, and {before} before. Return the same each time."
            )
        if shares:
            return self._share(result)
        loss, weight = checks.weighted(result)
        if not self._checked and weight > 1:
            checks.require_sum(loss, weight)
            self._checked = True
        return Summed(loss, weight)

    def _share(self, result: torch.Tensor) -> Summed:
        if self._measures_noise:
            raise UsageError(
                "measure_noise: not where forward returns a share of the loss, whose number of terms is not "
                "known. Return the sum over all terms, and their number."
            )
        if not self.equal_rows:
            raise UsageError(
                "rows: some ranks have more than others, and forward returns a share of the loss, which is "
                "averaged over ranks. Return the sum over all terms, and their number; or give each rank as "
                "many rows."
            )
        # One for each rank: a step divides by the sum of the weights, so this makes the mean over ranks.
        return Summed(checks.differentiable(result), int(self.begins))
