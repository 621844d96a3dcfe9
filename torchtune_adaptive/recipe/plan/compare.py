"""The same config on several devices, from the same traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchtune_adaptive.planner import DeviceLimits, Pace, Peak, Speed, TracedRun
from torchtune_adaptive.recipe.plan.predict import Query, speed_of


@dataclass(frozen=True)
class OnDevice:
    """What is predicted for one of the devices."""

    device: DeviceLimits
    peak: Peak
    """At the configured batch size."""
    largest: int
    """The largest micro-batch that fits; 0 if none does."""
    speed: Speed | None
    verdict: str


def compare(query: Query, devices: Sequence[tuple[DeviceLimits, Pace | None]]) -> list[OnDevice]:
    """Predict a config for several devices. Call it in a process that does nothing else: see ``workers``."""
    traces = query.traces()
    run = TracedRun(traces, query.length)
    found = []
    for device, pace in devices:
        peak = run.peak(query.rows, query.length, device)
        largest = run.largest(query.length, device)
        speed = speed_of(run, replace(query, pace=pace))
        found.append(OnDevice(device, peak, largest, speed, peak.verdict(device)))
    traces.remember()
    return found
