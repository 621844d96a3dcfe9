"""Which of several ways to take a step is fastest, by timing as few of them as possible.

Pure: what fits and how long steps take is asked of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

Way = TypeVar("Way")

FIRST_ROUND = 2
"""Timed steps of each way in the first round; twice as many in each that follows."""


def fitting(
    ranked: Iterable[Way],
    fits: Callable[[Way], bool],
    needs_as_much: Callable[[Way, Way], bool],
    most: int,
) -> list[Way]:
    """The first of the ranked ways that fit.

    Args:
        ranked: the ways, from the one that should be fastest.
        fits: tries one.
        needs_as_much: whether the first of two ways certainly needs no less memory than the second.
        most: how many are wanted.
    """
    found: list[Way] = []
    too_large: list[Way] = []
    for way in ranked:
        if len(found) == most:
            break
        if any(needs_as_much(way, other) for other in too_large):
            continue
        (found if fits(way) else too_large).append(way)
    return found


@dataclass
class Timing(Generic[Way]):
    """A way, and the seconds of its steps."""

    way: Way
    steps: list[float] = field(default_factory=list)
    failed: bool = False
    """A step that was to be timed ran out of memory."""

    @property
    def seconds(self) -> float:
        """Of one step; the median, because machines have moments in which they do something else."""
        return median(self.steps) if self.steps and not self.failed else float("inf")


def fastest(
    ways: Sequence[Way], time: Callable[[Way, int], Sequence[float] | None], own: Way | None
) -> tuple[Timing[Way] | None, list[Timing[Way]]]:
    """Time the ways by successive halving: after each round the slower half goes, the others get more steps.

    The user's own way stays to the end, so the result is never slower than that, as measured side by side.

    Args:
        ways: what may be used.
        time: takes so many steps; their seconds, or None if one ran out of memory.
        own: of the ways, the one that is used if no other is faster.

    Returns:
        The fastest, and all of them.
    """
    timings = [Timing(way) for way in ways]
    running, steps = list(timings), FIRST_ROUND
    while running:
        for timing in running:
            seconds = time(timing.way, steps)
            timing.failed = timing.failed or seconds is None
            timing.steps += seconds or ()
        # Stable: among equals, the one that should be faster stays.
        running = sorted((one for one in running if not one.failed), key=lambda one: one.seconds)
        others = [one for one in running if one.way != own]
        if len(others) <= 1:
            break
        gone = others[(len(others) + 1) // 2 :]
        running = [one for one in timings if one in running and one not in gone]
        steps *= 2
    best = running[0] if running else None
    mine = next((one for one in running if one.way == own), None)
    if best is not None and mine is not None and mine.seconds <= best.seconds:
        best = mine
    return best, timings
