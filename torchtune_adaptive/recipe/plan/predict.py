"""The prediction for one config: the peak at its batch size, and the largest micro-batch that fits.

A few steps are traced (see ``recipe.tracing``). From them the peak at any size is computed, as torch's
caching allocator would reach it (see ``planner.memory``).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtune_adaptive.core import Rounding, candidates
from torchtune_adaptive.planner import Answer, DeviceLimits, Pace, Peak, Question, Speed, TracedRun
from torchtune_adaptive.recipe.plan.rollout import RolloutPlanner, RolloutPrediction, RolloutQuery
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.tracing.traces import Traces


def planned_rank(asked: Asked) -> int:
    """The rank that a plan stands for: the first of FSDP, whose share is the largest, and the last of those
    that split layers. Where their parts are uneven, it pads its part of the logits before they are gathered,
    which takes more than a smaller part saves."""
    return asked.holders - 1


@dataclass(frozen=True)
class Query:
    """A question about one config."""

    asked: Asked
    ranks: int
    device: DeviceLimits
    rows: int
    """Micro-batch that is configured."""
    length: int
    rank: int = 0
    cache: bool | str = False
    """Folder where traces are kept, as the run's setting names it."""
    in_detail: bool = False
    """Whether to compute the curve and the timeline, too."""
    confirmed: bool = False
    """Whether to trace the largest size itself, as a check of the way it was computed."""
    may_trace: bool = True
    """Whether to trace what is not remembered."""
    rounding: Rounding = "power_of_two"
    """Sizes that a search may return."""
    ceiling: int | None = None
    """Largest size that it may return."""
    pace: Pace | None = None
    """Pace that its speed follows from, if that is known."""
    rollout: RolloutQuery | None = None
    """The phases of a rollout, if rows are generated."""

    @property
    def accumulation(self) -> int:
        """Micro-batches in a step."""
        return self.asked.accumulation

    @property
    def question(self) -> Question:
        """What is asked of the config's steps."""
        pace = self.pace and replace(self.pace, ranks=self.ranks)
        return Question(
            self.device, self.rows, self.length, self.accumulation, pace, confirmed=self.confirmed
        )

    @property
    def rows_per_step(self) -> int:
        """Rows of each rank in a step."""
        return self.rows * self.accumulation

    def traces(self) -> Traces:
        """The config's steps: those that are remembered, and others as they are traced."""
        return Traces(self.asked, self.ranks, self.rank, self.cache, self.may_trace)


@dataclass(frozen=True)
class Prediction:
    """The prediction for one config."""

    rows: int
    length: int
    ranks: int
    rank: int
    largest: int
    """Largest micro-batch that fits; 0 if none does."""
    configured: Peak
    at_largest: Peak | None
    rounding: Rounding
    picked: Peak | None
    """Peak at the micro-batch that a search of the same config picks, if the data has enough rows."""
    curve: list[tuple[int, int, int]]
    """Rows, allocated, reserved."""
    timeline: list[tuple[str, dict[str, int]]]
    traced_directly: bool
    """Whether steps were not bilinear, so that each size was traced separately."""
    uneven: bool
    """Whether ranks hold different shares of the parameters."""
    seconds: float
    tool_bytes: int
    """Peak memory of the process that made the prediction."""
    speed: Speed | None = None
    """Speed at the configured batch size."""
    as_written: str = ""
    """The reason why something that is compiled was predicted as it is written; empty if nothing was."""
    rollout: RolloutPrediction | None = None
    """All phases, if rows are generated; the rest is about training, and the speed that of rollouts."""

    def verdict(self, device: DeviceLimits) -> str:
        """The verdict on what is configured."""
        of = self.rollout.limiting if self.rollout else self
        return of.configured.verdict(device)


def predict(query: Query, traces: Traces | None = None) -> Prediction:
    """Trace and predict. Call it in a process that does nothing else: see ``workers``."""
    started = time.perf_counter()
    traces = traces or query.traces()
    found = _of_rollouts(query, traces) if query.rollout else _of_steps(query, traces)
    prediction = Prediction(
        rows=query.rows,
        length=query.length,
        ranks=query.ranks,
        rank=query.rank,
        rounding=query.rounding,
        uneven=bool(traces.uneven),
        seconds=time.perf_counter() - started,
        as_written=traces.as_written,
        tool_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **found,
    )
    traces.remember()
    return prediction


def _of_steps(query: Query, traces: Traces) -> dict[str, Any]:
    length, device = query.length, query.device
    run = TracedRun(traces, length)
    found = run.answer(query.question)
    most = found.largest
    picked = _picked(query, most)
    return {
        "largest": most,
        "configured": found.peak,
        "at_largest": run.peak(most, length, device) if most else None,
        "picked": run.peak(picked, length, device) if picked else None,
        "curve": _curve(run, query, most) if query.in_detail else [],
        "timeline": run.timeline(query.rows, length, device) if query.in_detail else [],
        "speed": found.speed,
        "traced_directly": run.direct,
    }


def _of_rollouts(query: Query, traces: Traces) -> dict[str, Any]:
    assert query.rollout is not None
    about = (query.length, query.device, query.rounding, query.pace, query.confirmed)
    rollout = RolloutPlanner(query.rollout, traces, *about).predict()
    training = rollout.phases[-1]
    return {
        "largest": training.largest,
        "configured": training.configured,
        "at_largest": None,
        "picked": training.picked,
        "curve": [],
        "timeline": [],
        "speed": rollout.speed,
        "traced_directly": False,
        "rollout": rollout,
    }


def _picked(query: Query, most: int) -> int | None:
    """The size that a search returns if ``most`` is the largest that fits."""
    ceiling = min(most, query.ceiling or most)
    return max(candidates(query.rounding, ceiling, query.rows_per_step), default=None)


def _curve(run: TracedRun, query: Query, most: int) -> list[tuple[int, int, int]]:
    """Peaks at the sizes of interest, and at some between and above them."""
    end = max(most * 5 // 4, query.rows, 8)
    sizes = sorted({query.rows, most or 1, *(max(2, end * n // 8) for n in range(9))})
    peaks = ((rows, run.peak(rows, query.length, query.device)) for rows in sizes)
    return [(rows, peak.allocated, peak.reserved) for rows, peak in peaks]


def compare(query: Query, devices: Sequence[tuple[DeviceLimits, Pace | None]]) -> list[Answer]:
    """Predict a config for several devices. Call it in a process that does nothing else: see ``workers``."""
    traces = query.traces()
    run = TracedRun(traces, query.length)
    found = [
        run.answer(replace(query, device=device, pace=pace).question) for device, pace in devices
    ]
    traces.remember()
    return found
