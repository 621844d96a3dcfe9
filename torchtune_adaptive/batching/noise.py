"""Gradient noise: how much of a gradient is chance, and so how large a batch is worth its rows.

A step adds up gradients of small batches, one for each micro-batch of each rank. Were they all alike, the
squared norm of their sum would be far more than the sum of their squared norms; were they nothing but
noise, both would be the same. In between lies the *noise scale* (McCandlish et al., 2018, "An Empirical
Model of Large-Batch Training"): the batch at which noise and gradient are of equal size. Much below it,
twice the batch does nearly the work of two steps; much above it, hardly more than that of one.

Losses here are summed over tokens, so small batches may have any number of tokens, and n tokens are
expected to give a squared norm of ``n² |G|² + n tr Σ``: G the mean gradient of a token, Σ the covariance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class NoiseSums:
    """What is summed up about the gradients of one step, or of many. All estimates are made of these.

    Sums of many steps come first and ratios last: the ratio of a single step is noise, and often negative.
    """

    small: float
    """Squared norms of the gradients of the small batches."""
    small_tokens: float
    """Tokens of these batches."""
    small_tokens_squared: float
    """The square of each one's tokens."""
    big: float
    """Squared norm of the whole step's gradient."""
    tokens: float
    """Tokens of the whole step."""
    tokens_squared: float
    """Their square."""
    rows: float
    """Rows of the whole step."""

    def decayed(self, decay: float, new: NoiseSums) -> NoiseSums:
        """These sums with less weight, and new ones added."""
        pairs = zip(self.values(), new.values(), strict=True)
        return NoiseSums(*(decay * old + added for old, added in pairs))

    def values(self) -> tuple[float, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def squared_gradient(self) -> float:
        """The estimate of ``|G|²``. It has no bias, so it may be negative; NaN where there is none."""
        return self._solved(self.big * self.small_tokens - self.small * self.tokens)

    def variance(self) -> float:
        """The estimate of ``tr Σ``: a token's variance, over all parameters. Else like the above."""
        return self._solved(self.small * self.tokens_squared - self.big * self.small_tokens_squared)

    def scale_in_tokens(self) -> float | None:
        """``tr Σ / |G|²``; None where either is not positive, which says that it takes more steps."""
        gradient, variance = self.squared_gradient(), self.variance()
        if not (gradient > 0 and variance > 0):
            return None
        scale = variance / gradient
        return scale if 0 < scale < math.inf else None

    def _solved(self, numerator: float) -> float:
        """One of the two unknowns, from what ``small`` and ``big`` are expected to be (Cramer's rule)."""
        apart = self.small_tokens * self.tokens_squared - self.small_tokens_squared * self.tokens
        return numerator / apart if apart > 0 else math.nan  # 0: the small batch is the whole step


class NoiseScale:
    """The noise scale of late: what each step's sums say, those of the last steps most.

    Args:
        window: steps over which the sums are averaged, with exponentially falling weights.
        least_steps: there is no estimate before so many.
    """

    def __init__(self, window: int = 100, least_steps: int = 10) -> None:
        self._decay = 1 - 1 / window
        self._least_steps = least_steps
        # Not divided by its weights: all sums have the same ones, and only ratios are looked at.
        self._sums = NoiseSums(*(0.0 for _ in fields(NoiseSums)))
        self.steps = 0

    def update(self, sums: NoiseSums | None) -> None:
        """After a step. One that could not measure anything, or overflowed, is as if it had not been."""
        if sums is None or not all(map(math.isfinite, sums.values())):
            return
        self._sums = self._sums.decayed(self._decay, sums)
        self.steps += 1

    @property
    def scale_in_tokens(self) -> float | None:
        """None as long as there is no estimate worth the name; never 0, negative, or NaN."""
        return self._sums.scale_in_tokens() if self.steps >= self._least_steps else None

    @property
    def scale_in_rows(self) -> float | None:
        """The same, in rows with as many tokens as they have had on average."""
        scale = self.scale_in_tokens
        return scale * self._sums.rows / self._sums.tokens if scale is not None else None

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "sums": asdict(self._sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        self._sums = NoiseSums(**state["sums"])


class GrowthController:
    """Says when to double the batch: when the noise scale has been twice the batch for a while.

    Every rank holds one of these and is told the same, so all ranks decide the same without asking. It
    never asks for less: what a smaller batch would save, it has saved already.

    Args:
        patience: checks in a row that must be for it; noise in the noise scale is no reason.
        dwell_steps: checks between two doublings, and before the first.
        factor: how many noise scales the batch should have.
    """

    def __init__(self, patience: int = 3, dwell_steps: int = 100, factor: float = 1.0) -> None:
        self._patience = patience
        self._dwell_steps = dwell_steps
        self._factor = factor
        self._in_favour = 0  # checks in a row
        self._since = 0  # checks, since the last doubling

    def update(self, scale_in_rows: float | None, global_batch: int) -> bool:
        """After a step: whether the batch should be doubled now. It is taken at its word: this counts as
        the last doubling from here on. A scale that is not known is no reason for anything."""
        self._since += 1
        wanted = scale_in_rows is not None and self._factor * scale_in_rows >= 2 * global_batch
        self._in_favour = self._in_favour + 1 if wanted else 0
        if self._in_favour < self._patience or self._since < self._dwell_steps:
            return False
        self._in_favour = self._since = 0
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"in_favour": self._in_favour, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._in_favour, self._since = state["in_favour"], state["since"]
