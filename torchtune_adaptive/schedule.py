"""When the batch grows, and what that does to the learning rate; all of it counted in samples.

A schedule looks at a ``Moment`` of the run and says which global batch it wants. It is a component for
``batch_increase_function``, wherever a function would do:

    batch_increase_function:
      _component_: torchtune_adaptive.schedule.Geometric
      factor: 2
      every: 1  # epochs

Nothing here is counted in steps: how many steps an epoch has depends on the batch, and what is counted in
steps (a warm-up, a decay, a position in the data) ends early or never once the batch grows.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune_adaptive.batching.noise import GrowthController

IncreaseFunction = Callable[[int, int], int]
"""``f(epoch, current_batch_size) -> increment``, of the micro-batch, called as an epoch begins."""


@dataclass(frozen=True)
class Moment:
    """A point between two steps."""

    samples: int
    """Trained on so far, over all ranks and epochs."""
    epochs: float
    """How far the run is: 1.5 in the middle of its second epoch."""
    start: int
    """The global batch that the run began with."""
    current: int
    """The global batch of the last step."""
    lr_factor: float = 1.0
    """The base learning rate, over the highest that it has been."""
    noise: float | None = None
    """The gradient noise scale in rows, where it is measured and known."""


class Schedule(ABC):
    """Says which global batch it wants. It is asked before every step, with one moment after the other."""

    lr_scaling = "none"
    """What the learning rate does if the config does not say."""
    needs_noise = False
    predictable = True
    """Whether it depends on the moment's samples and epochs only, so that steps can be counted ahead."""

    @abstractmethod
    def global_batch(self, now: Moment) -> int:
        """Rows in a step over all ranks. What the run cannot have it gets as nearly as it can."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most have none
        """Go on where ``state_dict`` was called."""


def _at_least(name: str, value: Any, minimum: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= minimum:
        raise ValueError(f"{name}: {value!r} is not a number of at least {minimum:g}")


class Step(Schedule):
    """The global batches that are written down: ``at: {0: 64, 250000: 128}``, by samples.

    Args:
        at: global batch by the number of samples after which it begins.
    """

    def __init__(self, at: Mapping[int, int]) -> None:
        for samples, batch in at.items():
            _at_least("samples", samples, 0)
            _at_least("global batch", batch, 1)
        self._at = sorted((int(samples), int(batch)) for samples, batch in at.items())

    def global_batch(self, now: Moment) -> int:
        return max(
            (batch for samples, batch in self._at if samples <= now.samples), default=now.start
        )


class Geometric(Schedule):
    """Multiplied by ``factor`` each time ``every`` epochs are over (AdaBatch: doubling).

    Args:
        factor: more than 1.
        every: epochs; may be a fraction.
    """

    def __init__(self, factor: float = 2, every: float = 1) -> None:
        _at_least("factor", factor, 1)
        _at_least("every", every, 1e-6)
        self._factor = factor
        self._every = every

    def global_batch(self, now: Moment) -> int:
        times = math.floor(now.epochs / self._every + 1e-9)
        # A power that no computer holds is more than any run can have.
        most = 62 / math.log2(self._factor) if self._factor > 1 else times
        return int(now.start * self._factor ** min(times, most))


class Linear(Schedule):
    """From the batch that the run begins with to ``to``, in equal increments (Megatron's ramp).

    Args:
        to: global batch at the end of the ramp.
        over: epochs that the ramp takes.
        increment: rows that are added at a time; by default the batch that the run begins with.
    """

    def __init__(self, to: int, over: float = 1, increment: int | None = None) -> None:
        _at_least("to", to, 1)
        _at_least("over", over, 1e-6)
        _at_least("increment", 1 if increment is None else increment, 1)
        self._to = to
        self._over = over
        self._increment = increment

    def global_batch(self, now: Moment) -> int:
        increment = self._increment or now.start
        increments = max(0, -(-(self._to - now.start) // increment))
        done = min(increments, math.floor(now.epochs / self._over * increments + 1e-9))
        return max(now.start, min(self._to, now.start + done * increment))


class Seesaw(Schedule):
    """Doubles where the base learning rate has halved; with ``sqrt`` scaling the rate falls by sqrt 2 there.

    The learning rate's warm-up does not count: what counts is its fall from the highest that it has been.
    """

    lr_scaling = "sqrt"
    predictable = False

    def global_batch(self, now: Moment) -> int:
        if now.lr_factor <= 0:
            return now.current
        return now.start * 2 ** min(62, math.floor(-math.log2(now.lr_factor) + 1e-9))


class Replay(Schedule):
    """What a recorded run decided, at the same samples.

    Args:
        path: of its ``batch_size_events.jsonl``.
    """

    def __init__(self, path: str) -> None:
        rows = [json.loads(row) for row in Path(path).read_text().splitlines()]
        grown = [row for row in rows if "global_batch" in row]
        if not grown:
            raise ValueError(f"path: {path!r} records no growth of the batch")
        self._steps = Step({row["samples"]: row["global_batch"][1] for row in grown})

    def global_batch(self, now: Moment) -> int:
        return self._steps.global_batch(now)


class GradientNoise(Schedule):
    """Doubles when the gradient noise scale, as it is measured, has been twice the batch for a while.

    Args:
        patience: steps in a row that must be for it.
        dwell: steps between two doublings, and before the first.
        factor: how many noise scales the batch should have.
    """

    needs_noise = True
    predictable = False

    def __init__(self, patience: int = 3, dwell: int = 100, factor: float = 1.0) -> None:
        _at_least("patience", patience, 1)
        _at_least("dwell", dwell, 1)
        _at_least("factor", factor, 1e-6)
        self._controller = GrowthController(patience, dwell, factor)
        self._asked_at = -1

    def global_batch(self, now: Moment) -> int:
        if now.samples == self._asked_at:  # between two epochs it is asked twice
            return now.current
        self._asked_at = now.samples
        return now.current * (2 if self._controller.update(now.noise, now.current) else 1)

    def state_dict(self) -> dict[str, Any]:
        return {"asked_at": self._asked_at, **self._controller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._asked_at = state["asked_at"]
        self._controller.load_state_dict(state)
