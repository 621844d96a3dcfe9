"""The prediction for one config: the peak at its batch size, and the largest micro-batch that fits.

A few steps are traced (see ``trace``). From them the peak at any size is computed, as torch's caching
allocator would reach it (see ``memory_model``).
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from torchtune_adaptive.memory_model.peak import DeviceLimits, Peak
from torchtune_adaptive.trace.traces import TracedRun, Traces


@dataclass(frozen=True)
class Query:
    """What to predict, for one config."""

    cfg: dict[str, Any]
    ranks: int
    device: DeviceLimits
    rows: int
    """The micro-batch that is configured."""
    length: int
    rank: int = 0
    cache: bool | str = False
    """Where traces are kept."""
    other_lengths: tuple[int, ...] = ()
    in_detail: bool = False
    """Whether to compute the curve and the timeline, too."""
    confirmed: bool = False
    """Whether to trace the largest size itself, as a check of the way it was computed."""


@dataclass(frozen=True)
class Prediction:
    """What is predicted for one config."""

    rows: int
    length: int
    ranks: int
    rank: int
    largest: int
    """The largest micro-batch that fits; 0 if none does."""
    configured: Peak
    at_largest: Peak | None
    lengths: dict[int, int]
    """The largest micro-batch by row length, for the other lengths of the query."""
    curve: list[tuple[int, int, int]]
    """Rows, allocated, reserved."""
    timeline: list[tuple[str, dict[str, int]]]
    traced_directly: bool
    """Whether steps were not bilinear, so that each size was traced separately."""
    uneven: bool
    """Whether ranks hold different shares of the parameters."""
    seconds: float
    tool_bytes: int
    """The peak memory of the process that made the prediction."""


def predict(query: Query) -> Prediction:
    """Trace and predict. Call it in a process that does nothing else: see ``workers``."""
    started = time.perf_counter()
    cfg, length, device = OmegaConf.create(query.cfg), query.length, query.device
    traces = Traces(cfg, query.ranks, query.rank, query.cache)
    run = TracedRun(traces, length, any_length=bool(query.other_lengths))
    largest = (run.confirmed_largest if query.confirmed else run.largest)(length, device)
    prediction = Prediction(
        rows=query.rows,
        length=length,
        ranks=query.ranks,
        rank=query.rank,
        largest=largest,
        configured=run.peak(query.rows, length, device),
        at_largest=run.peak(largest, length, device) if largest else None,
        lengths={other: run.largest(other, device) for other in query.other_lengths},
        curve=_curve(run, query, largest) if query.in_detail else [],
        timeline=run.timeline(query.rows, length, device) if query.in_detail else [],
        traced_directly=run.direct,
        uneven=bool(traces.uneven),
        seconds=time.perf_counter() - started,
        tool_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    traces.remember()
    return prediction


def _curve(run: TracedRun, query: Query, largest: int) -> list[tuple[int, int, int]]:
    """Peaks at the sizes of interest, and at some between and above them."""
    most = max(largest * 5 // 4, query.rows, 8)
    sizes = sorted({query.rows, largest or 1, *(max(2, most * n // 8) for n in range(9))})
    peaks = ((rows, run.peak(rows, query.length, query.device)) for rows in sizes)
    return [(rows, peak.allocated, peak.reserved) for rows, peak in peaks]
