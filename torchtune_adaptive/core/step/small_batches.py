"""What gradient noise is estimated from: the gradients of batches that are smaller than a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchtune_adaptive.core.ranks.reduction import Reduction
from torchtune_adaptive.core.sizes.noise import NoiseSums


class SmallBatches:
    """Squared norms of this rank's gradients of small batches; only looks at gradients.

    FSDP reduces the gradient of each micro-batch by itself, so the input of its reduce-scatter is this rank's
    gradient of that micro-batch alone. Replicas reduce what a rank has accumulated, which is one small batch
    then. With nothing to reduce over, a step has one small batch: the first micro-batch, whose gradient
    stands alone until the second one's is added.
    """

    def __init__(self, device: torch.device, reduction: Reduction) -> None:
        self._averaged_over = reduction.averaged_over
        self.of_rank = reduction.after_backward
        """Whether all micro-batches of a rank are one small batch."""
        self._reduced = torch.zeros((), dtype=torch.float64, device=device)  # their squared norms
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._weights: list[int] = []  # of each micro-batch
        self._rows = 0
        self._reduces = False
        self._first: torch.Tensor | None = None  # squared norm of the first one's gradient

    def before_forward(self, squared_norm: Callable[[], torch.Tensor]) -> None:
        """Another micro-batch follows; ``squared_norm`` is of the gradient that has been accumulated."""
        if len(self._weights) == 1 and not self._reduces and not self.of_rank:
            self._first = squared_norm()

    def after_forward(self, weight: int, rows: int) -> None:
        self._weights.append(weight)
        self._rows += rows

    def reducing(self, gradient: torch.Tensor) -> None:
        """Called by FSDP with gradients of some parameters; must not make the host wait."""
        square = torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()
        # The first of a step overwrites the previous step's sum: zeroing it beforehand would happen on
        # another stream, and after a failure nothing orders the two.
        if self._reduces:
            self._reduced.add_(square)
        else:
            self._reduced.copy_(square)
        self._reduces = True

    def before_reduction(self, gradients: Sequence[torch.Tensor]) -> None:
        """All micro-batches are done, and what this rank has accumulated is reduced next."""
        for gradient in gradients:
            self.reducing(gradient)
        self._weights = [sum(self._weights)]

    @property
    def measured(self) -> bool:
        return self._reduces or self._first is not None

    def sums(self) -> tuple[torch.Tensor | float, ...]:
        """What is to be summed over all ranks."""
        if self._reduces:
            squares = sum(weight * weight for weight in self._weights)
            return self._reduced, float(sum(self._weights)), float(squares), float(self._rows)
        if self._first is not None:
            return self._first, float(self._weights[0]), 0.0, float(self._rows)
        return 0.0, 0.0, 0.0, float(self._rows)

    def over_ranks(
        self, totals: Sequence[float], weight: float, squared_norm: float
    ) -> NoiseSums | None:
        """The sums over all ranks; None if no batch was smaller than the step.

        Args:
            totals: of ``sums``.
            weight: of the step.
            squared_norm: of its gradient, as it has been reduced.
        """
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


class NoSmallBatches:
    """Does nothing in place of ``SmallBatches``, where noise is not measured."""

    of_rank = measured = False
    reducing = None

    def begin(self) -> None: ...

    def before_forward(self, squared_norm: Callable[[], torch.Tensor]) -> None: ...

    def after_forward(self, weight: int, rows: int) -> None: ...

    def before_reduction(self, gradients: Sequence[torch.Tensor]) -> None: ...

    def sums(self) -> tuple[torch.Tensor | float, ...]:
        return ()

    def over_ranks(self, totals: Sequence[float], weight: float, squared_norm: float) -> None: ...
