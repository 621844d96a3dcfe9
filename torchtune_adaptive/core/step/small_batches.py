"""The gradients of batches that are smaller than a step, from which gradient noise is estimated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchtune_adaptive.core.ranks.fsdp import Reducing
from torchtune_adaptive.core.ranks.reduction import Reduction
from torchtune_adaptive.core.sizes.noise import NoiseSums


class SmallBatches:
    """Squared norms of this rank's gradients of small batches; only looks at gradients.

    FSDP reduces the gradient of each micro-batch by itself, so the input of its reduce-scatter is this rank's
    gradient of that micro-batch alone. Replicas reduce what a rank has accumulated, which is one small batch
    then. With nothing to reduce over, a step has one small batch: the first micro-batch, whose gradient
    stands alone until the second one's is added.

    Unless it is ``on``, nothing is looked at.
    """

    def __init__(self, device: torch.device, reduction: Reduction, on: bool) -> None:
        self.on = on
        self._averaged_over = reduction.averaged_over
        self.of_rank = on and reduction.in_last
        """Whether all micro-batches of a rank are one small batch."""
        if on:  # or not a byte of the device is taken
            self._reduced = torch.zeros((), dtype=torch.float64, device=device)
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._weights: list[int] = []  # of each micro-batch
        self._rows = 0
        self._reduces = False
        self._first: torch.Tensor | None = None  # squared norm of the first one's gradient

    def before_forward(self, squared_norm: Callable[[], torch.Tensor]) -> None:
        """Look at the gradient accumulated so far, of which ``squared_norm`` is the squared norm."""
        if self.on and len(self._weights) == 1 and not self._reduces and not self.of_rank:
            self._first = squared_norm()

    def after_forward(self, weight: int, rows: int) -> None:
        self._weights.append(weight)
        self._rows += rows

    @property
    def observer(self) -> Reducing | None:
        """Function that FSDP calls with gradients of some parameters, where noise is measured."""
        return self._reducing if self.on else None

    def _reducing(self, gradient: torch.Tensor) -> None:
        """Add its squared norm to the sum; must not make the host wait."""
        square = torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()
        # The first of a step overwrites the previous step's sum: zeroing it beforehand would happen on
        # another stream, and after a failure nothing orders the two.
        if self._reduces:
            self._reduced.add_(square)
        else:
            self._reduced.copy_(square)
        self._reduces = True

    def before_reduction(self, gradients: Sequence[torch.Tensor]) -> None:
        """Look at what this rank has accumulated, after all micro-batches and before it is reduced."""
        for gradient in gradients:
            self._reducing(gradient)
        self._weights = [sum(self._weights)]

    @property
    def measured(self) -> bool:
        return self._reduces or self._first is not None

    def sums(self) -> tuple[torch.Tensor | float, ...]:
        """The terms of this rank in sums over all ranks, if there are any."""
        if self._reduces:
            squares = sum(weight * weight for weight in self._weights)
            return self._reduced, float(sum(self._weights)), float(squares), float(self._rows)
        if self._first is not None:
            return self._first, float(self._weights[0]), 0.0, float(self._rows)
        return ()

    def over_ranks(
        self, totals: Sequence[float], weight: float, squared_norm: float
    ) -> NoiseSums | None:
        """The sums over all ranks, from the totals of ``sums`` and the step's weight and squared norm of the
        reduced gradient; None if no batch was smaller than the step."""
        small, small_weight, small_weight_squared, rows = totals
        to_sum = self._averaged_over**2  # FSDP reduces to the mean over ranks
        if not self._reduces:  # the one small batch spans all ranks
            small, small_weight_squared = small * to_sum, small_weight**2
        if not 0 < small_weight_squared < weight**2:
            return None
        return NoiseSums(
            small=small,
            small_tokens=small_weight,
            small_tokens_squared=small_weight_squared,
            big=squared_norm * to_sum,
            tokens=weight,
            tokens_squared=weight**2,
            rows=rows,
        )
