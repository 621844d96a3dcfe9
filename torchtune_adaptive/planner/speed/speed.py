"""The speed of a run: tokens per second, utilization, hours and cost, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchtune_adaptive.planner.speed.devices import Speeds
from torchtune_adaptive.planner.speed.operations import ATTENTION, StepOperations
from torchtune_adaptive.planner.speed.replay import NAMES, step_time

EAGER_BAND = (-0.30, 0.05)
"""How far below and above a predicted speed the real one may be, as shares of it. Below: 5 % quantile of 26
published eager rows that nobody had seen when the model was written. Above: none of these was faster than
predicted; of those that were known, one was by 5 % (``docs/results/speed_anchors.md``)."""
COMPILED_BAND, QUANTIZED_BAND = (-0.35, 0.10), (-0.45, 0.20)
"""The same where nothing that nobody had seen is known: allowances of 5 and 15 points more."""
MUCH_ATTENTION, SLOWEST_ATTENTION = 0.3, -0.45
"""Share of a step above which the kernels of attention decide, and how far below the predicted speed the real
one may be then. Predictions are for FlashAttention-2; of 22 published runs of such steps with older kernels,
the slowest was 42 % below (``docs/results/speed_anchors.md``)."""
SLOWEST_EXPERTS = -0.70
"""How far below the predicted speed the real one may be with a mixture of experts: of 10 published runs,
whose settings are known in part, the slowest was 67 % below (``docs/results/published_experts.md``)."""
MEASURED_BAND = (-0.05, 0.05)
"""The same of a prediction that a measurement on the same machine has corrected."""


@dataclass(frozen=True)
class Pace:
    """Facts about a run that decide how fast its steps are, apart from their operations."""

    speeds: Speeds
    ranks: int
    compiled: bool
    quantized: bool
    dtype: str
    """Type of the numbers that the model computes with."""
    correction: float | None = None
    """Measured / predicted seconds, where a run on this machine measured it."""
    holders: int = 1
    """Ranks that hold the same rows, and so train on them together."""
    experts: bool = False
    """Whether the model is a mixture of experts."""

    def band(self, attention: float) -> tuple[float, float]:
        """How far below and above a predicted speed the real one may be, as shares of it, if attention takes
        that share of a step."""
        if self.correction is not None:
            return MEASURED_BAND
        if self.quantized:
            low, high = QUANTIZED_BAND
        else:
            low, high = COMPILED_BAND if self.compiled else EAGER_BAND
        if attention > MUCH_ATTENTION:
            low = min(low, SLOWEST_ATTENTION)
        return (min(low, SLOWEST_EXPERTS) if self.experts else low), high

    def speed(self, step: StepOperations, rows: int, length: int, micro_batches: int) -> Speed:
        """The speed of a run whose steps are all like this one, which has one micro-batch or the first two of
        more; ``rows`` are those of a micro-batch, and ``length`` the tokens in each, padding included."""
        time = step_time(step, self.speeds, self.ranks, micro_batches, self.compiled)
        seconds = time.seconds * (self.correction or 1.0)
        rows_per_second = rows * micro_batches / seconds / self.holders
        peak = self.speeds.peak(self.dtype)
        parts = {kind: spent / time.seconds for kind, spent in time.parts.items()}
        return Speed(
            seconds=seconds,
            tokens_per_second_per_gpu=rows_per_second * length,
            mfu=time.model_flops / (seconds * peak) if peak else 0.0,
            parts=parts,
            recomputing=time.recomputing / time.seconds,
            band=self.band(parts.get(ATTENTION, 0.0)),
            rows_per_second_per_gpu=rows_per_second,
        )


@dataclass(frozen=True)
class Speed:
    """The speed of a run."""

    CLOSE: ClassVar = 0.08
    """Share by which one speed must be above another, with other micro-batches, to be so for sure: of pairs
    of published rows with the same model and GPU, nine in ten have errors that differ by less
    (``docs/results/speed_anchors.md``)."""

    seconds: float
    """Seconds of one step."""
    tokens_per_second_per_gpu: float
    """Tokens that a GPU trains on in a second, padding included."""
    mfu: float
    """Model FLOPs utilization: the share of the data sheet's peak that the forward and backward pass use;
    what the backward pass computes again does not count."""
    parts: dict[str, float]
    """Shares of the step's time, by what the device does; ``named_parts`` has them with names for people."""
    recomputing: float
    """Share of the time in which the backward pass repeats the forward pass."""
    band: tuple[float, float]
    """How far below and above it the real speed may be, as shares of it."""
    rows_per_second_per_gpu: float = 0.0
    """Rows that a GPU trains on in a second."""

    @property
    def attention_decides(self) -> bool:
        """Whether the speed depends most on how fast the kernels of attention are."""
        return self.parts.get(ATTENTION, 0.0) > MUCH_ATTENTION

    def named_parts(self) -> dict[str, float]:
        """The same shares with names for people."""
        return {NAMES.get(kind, kind): share for kind, share in self.parts.items()}

    def hours(self, tokens: float, ranks: int) -> float:
        return tokens / (self.tokens_per_second_per_gpu * ranks) / 3600
