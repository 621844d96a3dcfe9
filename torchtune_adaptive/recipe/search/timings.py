"""Which of several ways to take a step is fastest, by timing as few of them as possible.

Pure: what fits and how long steps take is asked of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median, quantiles
from typing import Generic, TypeVar

from torchtune_adaptive.core import strategies

Way = TypeVar("Way")

ROUND = 4
"""Timed steps of each way that is left, in each round."""
PREDICTION_ERROR = 0.03
"""Error of the ratio of two predictions, on average (``docs/results/fastest.md``)."""


def fitting(
    ranked: Sequence[Way],
    fits: Callable[[Way], bool],
    needs_as_much: Callable[[Way, Way], bool],
    line: Callable[[Way], Hashable],
    most: int,
) -> list[Way]:
    """The first of the ranked ways that fit, without those that only need less than one of them.

    Args:
        ranked: the ways, from the one that should be fastest.
        fits: a function that tries one; it remembers what it has tried.
        needs_as_much: a test whether the first of two ways certainly needs no less memory than the second.
        line: the line that a way is in, as in ``strategies.WaysThatFit``.
        most: the number of ways that are wanted.
    """
    found: list[Way] = []
    known = strategies.WaysThatFit(needs_as_much, line)
    for way in ranked:
        if len(found) == most:
            break
        if any(needs_as_much(other, way) for other in found):
            continue
        while known.fits(way) is None:
            tried = known.next(way, ranked)
            known.learn(tried, fits(tried))
        if known.fits(way) and fits(way):
            found.append(way)
    return found


@dataclass
class Timing(Generic[Way]):
    """A way, and the seconds of its steps."""

    way: Way
    predicted: float | None = None
    """Seconds of a step."""
    steps: list[float] = field(default_factory=list)
    failed: bool = False
    """Whether a step that was to be timed ran out of memory."""

    @property
    def seconds(self) -> float:
        """Seconds of one step; the median, because machines have moments in which they do something else."""
        return median(self.steps) if self.steps and not self.failed else float("inf")

    @property
    def measured(self) -> float | None:
        """Seconds of one step; None if none was timed."""
        return self.in_the_first(len(self.steps))

    @property
    def spread(self) -> float:
        """How much steps vary: the distance of their quartiles, as a share of the median."""
        if len(self.steps) < 2:
            return 0.0
        low, middle, high = quantiles(self.steps, n=4, method="inclusive")
        return (high - low) / middle

    def in_the_first(self, steps: int) -> float | None:
        """Seconds of one step, of so many that were timed."""
        return median(self.steps[:steps]) if self.steps else None


def fastest(
    ways: Sequence[Way],
    time: Callable[[Way, int], Sequence[float] | None],
    own: Way | None,
    predicted: Callable[[Way], float | None] = lambda way: None,
) -> tuple[Timing[Way] | None, list[Timing[Way]]]:
    """Time the ways by successive halving: after each round the slower half goes.

    The user's own way stays to the end, so the result is never slower than that, as measured side by side.

    Args:
        ways: the ways that may be used.
        time: a function that takes so many steps; their seconds, or None if one ran out of memory.
        own: the way that is used if no other is faster.
        predicted: seconds of a step, if there is a prediction.

    Returns:
        The fastest, and all of them.
    """
    timings = [Timing(way, predicted(way)) for way in ways]
    running = list(timings)
    while running:
        for timing in running:
            seconds = time(timing.way, ROUND)
            timing.failed = timing.failed or seconds is None
            timing.steps += seconds or ()
        running = _ranked([one for one in running if not one.failed])
        others = [one for one in running if one.way != own]
        if len(others) <= 1:
            break
        gone = others[(len(others) + 1) // 2 :]
        running = [one for one in timings if one in running and one not in gone]
    best = running[0] if running else None
    mine = next((one for one in running if one.way == own), None)
    if best is not None and mine is not None and mine.seconds <= best.seconds:
        best = mine
    return best, timings


def _ranked(timings: Sequence[Timing[Way]]) -> list[Timing[Way]]:
    """Timings in the order of what is known of them, the fastest first; among equals, the one that should be.

    A prediction counts as a measurement of as many steps as it takes to know their time as well as it is
    predicted. Where steps hardly vary, that is almost none.
    """
    predictions = [one.predicted for one in timings if one.predicted is not None]
    if not timings or len(predictions) < len(timings):
        return sorted(timings, key=lambda one: one.seconds)
    varies = mean((step / one.seconds - 1) ** 2 for one in timings for step in one.steps)
    weight = varies / PREDICTION_ERROR**2
    scale = median(one.seconds / each for one, each in zip(timings, predictions, strict=True))

    def estimate(one: Timing[Way]) -> float:
        assert one.predicted is not None
        measured = len(one.steps)
        return (measured * one.seconds + weight * scale * one.predicted) / (measured + weight)

    return sorted(timings, key=estimate)
