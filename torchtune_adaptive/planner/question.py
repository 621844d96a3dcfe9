"""A question about a step, and its answer: what every plan is made of, whosever step it is."""

from __future__ import annotations

from dataclasses import dataclass

from torchtune_adaptive.planner.memory.peak import DOES_NOT_FIT, DeviceLimits, Peak
from torchtune_adaptive.planner.speed.speed import Pace, Speed


@dataclass(frozen=True)
class Question:
    """What a step takes on a device, how fast it is, and what fits there."""

    device: DeviceLimits
    rows: int | None
    """The rows of a micro-batch; None for the largest that fits."""
    length: int
    """The tokens in a row, as traces have them."""
    micro_batches: int = 1
    """Their number in a step."""
    pace: Pace | None = None
    """Pace that the speed follows from, if that is known."""
    ceiling: int | None = None
    """The largest micro-batch to consider."""
    confirmed: bool = False
    """Whether to trace the largest size itself, as a check of the way it was computed."""
    tokens: int | None = None
    """The tokens in a row, for the speed, where traces do not know them."""


@dataclass(frozen=True)
class Answer:
    """The answer for one device."""

    device: DeviceLimits
    peak: Peak
    """Peak at the micro-batch that was asked for."""
    largest: int
    """Largest micro-batch that fits; 0 if none does."""
    speed: Speed | None
    """Speed at the micro-batch that was asked for, whether it fits or not."""
    verdict: str
    as_written: str = ""
    """The reason why something that is compiled was predicted as it is written; empty if nothing was."""

    @property
    def fits(self) -> bool:
        """Whether it may fit, as far as is known."""
        return self.verdict != DOES_NOT_FIT
