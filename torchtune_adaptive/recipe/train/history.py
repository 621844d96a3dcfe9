"""The steps of a run, as far as its summary and its curves show them, and as checkpoints keep them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from torchtune_adaptive.common import counted, duration
from torchtune_adaptive.recipe.train.watched import added

_POINTS = 1000  # of a curve; more would not be seen
_MARKS = 100  # of each kind; likewise
_WINDOW = 5  # steps


@dataclass
class Course:
    """What a number of steps came to: all of a run's, or some that follow each other."""

    steps: int = 0
    seconds: float = 0.0
    """Seconds from the first step to the end, saving included."""
    first: list[dict[str, float]] = field(default_factory=list)
    """What is watched of the first steps. A summary averages some, since one step's numbers are noisy."""
    last: list[dict[str, float]] = field(default_factory=list)
    """The same of the last ones."""
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, where steps have phases."""

    def add(self, values: dict[str, float], spent: Mapping[str, float]) -> None:
        """Add a step."""
        self.steps += 1
        self.first = [*self.first, values][:_WINDOW]
        self.last = [*self.last, values][-_WINDOW:]
        self.spent = added(self.spent, spent)

    def __add__(self, later: Course) -> Course:
        return Course(
            self.steps + later.steps,
            self.seconds + later.seconds,
            [*self.first, *later.first][:_WINDOW],
            [*self.last, *later.last][-_WINDOW:],
            added(self.spent, later.spent),
        )

    @property
    def _window(self) -> int:
        """The number of steps, at either end, that are averaged: they are different ones."""
        return max(1, min(_WINDOW, self.steps // 2))

    def changes(self) -> dict[str, str]:
        """Each number that is watched, at the beginning and at the end: ``2.9 -> 2.1``."""
        first, last = self.first[: self._window], self.last[-self._window :]
        return {name: f"{_mean(first, name):.4g} -> {_mean(last, name):.4g}" for name in last[-1]}

    def averaged(self) -> str:
        """The steps that ``changes`` compares."""
        if (window := self._window) == 1:
            return "first and last step"
        return f"mean of the first and last {window} steps"

    def text(self) -> str:
        changes = ", ".join(f"{name} {change}" for name, change in self.changes().items())
        steps = f"{counted(self.steps, 'step')} in {duration(self.seconds)}"
        return f"{steps}; {changes} ({self.averaged()})"


def _mean(steps: Sequence[Mapping[str, float]], name: str) -> float:
    known = [step[name] for step in steps if name in step]
    return sum(known) / max(len(known), 1)


class Point(NamedTuple):
    """A step, as far as curves show it."""

    step: int
    """Its number in the run, counted from 1."""
    samples: int
    """Samples used since the run began, those of the step included."""
    global_batch: int
    micro_batch: int
    lr: float
    values: dict[str, float]
    """What is watched, by name."""
    seconds: dict[str, float]
    """Seconds by phase: those of the rollout that the step is of, and those of its training."""
    peak_bytes: int | None
    """The peak of memory; None where it is not measured."""
    limit_bytes: int | None
    """The memory that there was; likewise."""


class MarkKind(StrEnum):
    """What a mark in the curves says."""

    RESUMED = "resumed"
    RETRIED = "step retried"
    CHANGED = "micro-batch or checkpointing changed"


class Mark(NamedTuple):
    """Something that happened to a run, as its curves show it."""

    samples: int
    text: str


class History:
    """The steps of a run, thinned out as they become many, and what happened in between.

    Args:
        loss_unit: the unit that the loss is a mean over.
    """

    def __init__(self, loss_unit: str = "token") -> None:
        self.loss_unit = loss_unit
        self.points: list[Point] = []
        self.marks: dict[MarkKind, list[Mark]] = {what: [] for what in MarkKind}
        self._every = 1
        self._seen = 0

    def add(self, point: Point) -> None:
        if self._seen % self._every == 0:
            self.points.append(point)
        self._seen += 1
        if len(self.points) > 2 * _POINTS:
            self.points = self.points[::2]
            self._every *= 2

    def mark(self, what: MarkKind, samples: int, text: str) -> None:
        """Mark the place at which so many samples have been used; of many marks, the newest are kept."""
        self.marks[what] = [*self.marks[what], Mark(samples, text)][-_MARKS:]

    def state_dict(self) -> dict[str, Any]:
        return {
            "points": [list(point) for point in self.points],
            "marks": {
                str(what): [list(mark) for mark in marks] for what, marks in self.marks.items()
            },
            "every": self._every,
            "seen": self._seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.points = [Point(*point) for point in state["points"]]
        self.marks |= {
            MarkKind(key): [Mark(*m) for m in marks] for key, marks in state["marks"].items()
        }
        self._every, self._seen = state["every"], state["seen"]
