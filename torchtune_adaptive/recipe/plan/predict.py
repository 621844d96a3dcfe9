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
from torchtune_adaptive.planner import Answer, DeviceLimits, Pace, Peak, Speed, TracedRun
from torchtune_adaptive.recipe.plan.query import Query
from torchtune_adaptive.recipe.plan.rollout import RolloutPlanner, RolloutPrediction
from torchtune_adaptive.recipe.tracing.traces import Traces


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction for one config."""

    rows: int
    length: int
    ranks: int
    rank: int
    largest: int
    """Largest micro-batch that fits; 0 if none does."""
    configured: Peak
    at_largest: Peak | None = None
    rounding: Rounding
    picked: Peak | None
    """Peak at the micro-batch that a search of the same config picks, if the data has enough rows."""
    traced_directly: bool = False
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
    generates = query.asked.kind.generates
    found = _of_rollouts(query, traces) if generates else _of_steps(query, traces)
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
    run = query.run(traces)
    found = run.answer(query.question)
    most, searched = found.largest, run.after_search()
    picked = _picked(query, searched.largest(length, device))
    return {
        "largest": most,
        "configured": found.peak,
        "at_largest": run.peak(most, length, device) if most else None,
        "picked": searched.peak(picked, length, device) if picked else None,
        "speed": found.speed,
        "traced_directly": run.direct,
    }


def _of_rollouts(query: Query, traces: Traces) -> dict[str, Any]:
    rollout = RolloutPlanner(query, traces).predict()
    training = rollout.phases[-1]
    return {
        "largest": training.largest,
        "configured": training.configured,
        "picked": training.picked,
        "speed": rollout.speed,
        "rollout": rollout,
    }


def _picked(query: Query, most: int) -> int | None:
    """The size that a search returns if ``most`` is the largest that fits."""
    ceiling = min(most, query.asked.settings.ceiling or most)
    return max(candidates(query.rounding, ceiling, query.rows_per_step), default=None)


def compare(query: Query, devices: Sequence[tuple[DeviceLimits, Pace | None]]) -> list[Answer]:
    """Predict a config for several devices. Call it in a process that does nothing else: see ``workers``."""
    runs: dict[bool, tuple[Traces, TracedRun]] = {}  # by what the steps of a device depend on
    found = []
    for device, pace in devices:
        here = replace(query, device=device, pace=pace)
        if device.before_ampere not in runs:
            traces = here.traces()
            runs[device.before_ampere] = traces, here.run(traces)
        _, run = runs[device.before_ampere]
        found.append(run.answer(here.question))
    for traces, _ in runs.values():
        traces.remember()
    return found
