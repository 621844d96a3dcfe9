"""Gradient noise: how much of a gradient is chance, and so how large a batch is worth its rows.

A step adds up gradients of small batches, one for each micro-batch of each rank. If they were all alike, the
squared norm of their sum would far exceed the sum of their squared norms; if they were nothing but noise,
both would be equal. In between lies the *noise scale* (McCandlish et al., 2018, "An Empirical Model of
Large-Batch Training"): the batch at which noise and gradient are of equal size. Far below it, doubling the
batch does nearly the work of two steps; far above it, hardly more than that of one.

Losses are summed over predicted tokens, so small batches may have any number of them. n tokens are expected
to give a squared norm of ``n² |G|² + n tr Σ``, with G the mean gradient of a token and Σ its covariance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class NoiseSums:
    """Sums over the gradients of one step or of many, from which all estimates are made.

    Many steps are summed before any ratio is taken: the ratio of a single step is noise, and often negative.
    """

    small: float
    """Squared norms of the gradients of the small batches."""
    small_tokens: float
    """Predicted tokens of these batches."""
    small_tokens_squared: float
    """Squares of each one's tokens."""
    big: float
    """Squared norm of the whole step's gradient."""
    tokens: float
    """Predicted tokens of the whole step."""
    tokens_squared: float
    """Their square."""
    rows: float
    """Rows of the whole step."""

    def decayed(self, decay: float, new: NoiseSums) -> NoiseSums:
        """These sums with less weight, and new ones added."""
        pairs = zip(astuple(self), astuple(new), strict=True)
        return NoiseSums(*(decay * old + added for old, added in pairs))

    def squared_gradient(self) -> float:
        """The unbiased estimate of ``|G|²``, which may be negative; NaN where there is none."""
        return self._solved(self.big * self.small_tokens - self.small * self.tokens)

    def variance(self) -> float:
        """The unbiased estimate of ``tr Σ``, a token's variance summed over parameters, or NaN."""
        return self._solved(self.small * self.tokens_squared - self.big * self.small_tokens_squared)

    def scale_in_tokens(self) -> float | None:
        """``tr Σ / |G|²``; None where either is not positive, which means that more steps are needed."""
        gradient, variance = self.squared_gradient(), self.variance()
        if not (gradient > 0 and variance > 0):
            return None
        scale = variance / gradient
        return scale if 0 < scale < math.inf else None

    def _solved(self, numerator: float) -> float:
        """One of the two unknowns, from the expectations of ``small`` and ``big`` (Cramer's rule)."""
        apart = self.small_tokens * self.tokens_squared - self.small_tokens_squared * self.tokens
        return numerator / apart if apart > 0 else math.nan  # 0: the small batch is the whole step


class NoiseScale:
    """The noise scale over recent steps.

    Args:
        window: steps over which the sums are averaged, with exponentially falling weights.
        least_steps: steps before there is an estimate.
    """

    def __init__(self, window: int = 100, least_steps: int = 10) -> None:
        self._decay = 1 - 1 / window
        self._least_steps = least_steps
        # Not divided by the weights: they are the same for all sums, and only ratios are used.
        self._sums = NoiseSums(*(0.0 for _ in fields(NoiseSums)))
        self.steps = 0

    def update(self, sums: NoiseSums | None) -> None:
        """Add a step. One that could not measure anything, or overflowed, is ignored."""
        if sums is None or not all(map(math.isfinite, astuple(sums))):
            return
        self._sums = self._sums.decayed(self._decay, sums)
        self.steps += 1

    @property
    def scale_in_tokens(self) -> float | None:
        """The scale; None until there is a usable estimate, and never 0, negative, or NaN."""
        return self._sums.scale_in_tokens() if self.steps >= self._least_steps else None

    @property
    def scale_in_rows(self) -> float | None:
        """The same in rows, with the average number of tokens per row."""
        scale = self.scale_in_tokens
        return scale * self._sums.rows / self._sums.tokens if scale is not None else None

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "sums": asdict(self._sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        self._sums = NoiseSums(**state["sums"])
