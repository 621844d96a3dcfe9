"""Schedules: when the global batch grows, as a function of consumed samples.

A schedule returns the global batch it wants at a ``Moment`` of the run. It is a component for
``batch_increase_function``, and can be used wherever a function can:

    batch_increase_function:
      _component_: torchtune_adaptive.schedule.Geometric
      factor: 2
      every: 1  # epochs

Nothing here is counted in steps: the number of steps in an epoch depends on the batch, and whatever is
counted in steps (a warm-up, a decay, a position in the data) ends early or never once the batch grows.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune_adaptive.core import LrScaling

IncreaseFunction = Callable[[int, int], int]
"""``f(epoch, current_batch_size) -> increment`` of the micro-batch, called at the start of each epoch."""


@dataclass(frozen=True)
class Moment:
    """The state of the run between two steps."""

    samples: int
    """Samples trained on so far, over all ranks and epochs."""
    epochs: float
    """Progress in epochs: 1.5 in the middle of the second one."""
    start: int
    """The global batch that the run started with."""
    current: int
    """The global batch of the last step."""
    lr_factor: float = 1.0
    """The base learning rate divided by the highest value it has had."""
    noise: float | None = None
    """The gradient noise scale in rows; None where it is not measured, or not known yet."""


class Schedule(ABC):
    """Base class: decides the global batch. It is called before every step, with moments in order.

    With one of your own, all ranks agree on its answer at the end of that step, so it counts from the next.
    """

    lr_scaling: LrScaling = "none"
    """The rule by which the learning rate follows the batch, unless ``lr_scaling`` is set."""
    needs_noise = False
    """Whether the gradient noise scale must be measured."""
    predictable = True
    """Whether it depends only on samples and epochs, so that steps can be counted in advance."""

    @abstractmethod
    def global_batch(self, now: Moment) -> int:
        """The rows wanted in a step, over all ranks; the run uses the nearest number that it can."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most have none
        """Continue from ``state_dict``."""


def _at_least(name: str, value: Any, minimum: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= minimum:
        raise ValueError(f"{name}: {value!r} must be a number >= {minimum:g}")


class Step(Schedule):
    """Fixed global batches by samples: ``at: {0: 64, 250000: 128}``.

    Args:
        at: global batches, by the number of samples from which each applies.
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
    """Multiplies the batch by ``factor`` every ``every`` epochs (AdaBatch: doubling).

    Args:
        factor: the growth each time, at least 1.
        every: epochs between two growths; may be a fraction.
    """

    def __init__(self, factor: float = 2, every: float = 1) -> None:
        _at_least("factor", factor, 1)
        _at_least("every", every, 1e-6)
        self._factor = factor
        self._every = every

    def global_batch(self, now: Moment) -> int:
        times = math.floor(now.epochs / self._every + 1e-9)
        # 2^62 times the start is more than any run can use, and still a finite number.
        most = 62 / math.log2(self._factor) if self._factor > 1 else times
        return int(now.start * self._factor ** min(times, most))


class Linear(Schedule):
    """Grows from the starting batch to ``to`` in equal increments (a ramp as in Megatron).

    Args:
        to: global batch at the end of the ramp.
        over: length of the ramp in epochs.
        increment: rows added at a time; by default the starting batch.
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
    """Doubles whenever the base learning rate halves; with ``sqrt`` scaling it falls by sqrt(2) instead.

    Warm-up does not matter: the rate is compared with the highest value it has had.
    """

    lr_scaling: LrScaling = "sqrt"
    predictable = False

    def global_batch(self, now: Moment) -> int:
        if now.lr_factor <= 0:
            return now.current
        return now.start * 2 ** min(62, math.floor(-math.log2(now.lr_factor) + 1e-9))


class Replay(Step):
    """Repeats the decisions of a recorded run, at the same samples.

    Args:
        path: the ``batch_size_events.jsonl`` of that run.
    """

    def __init__(self, path: str) -> None:
        rows = [json.loads(row) for row in Path(path).read_text().splitlines()]
        grown = [row for row in rows if "global_batch" in row]
        if not grown:
            raise ValueError(f"path: {path!r} records no growth of the batch")
        super().__init__({row["samples"]: row["global_batch"][1] for row in grown})


class GradientNoise(Schedule):
    """Doubles when ``factor`` times the measured gradient noise scale stays at twice the batch or above.

    Every rank has one and sees the same numbers, so all ranks decide alike without communicating. It never
    shrinks the batch: a small one pays off early in training, which has passed.

    Args:
        patience: consecutive steps in which that must hold, so that noise in the noise scale does not decide.
        dwell: minimum number of steps between two doublings, and before the first.
        factor: the wanted batch, in noise scales.
    """

    needs_noise = True
    predictable = False

    def __init__(self, patience: int = 3, dwell: int = 100, factor: float = 1.0) -> None:
        _at_least("patience", patience, 1)
        _at_least("dwell", dwell, 1)
        _at_least("factor", factor, 1e-6)
        self._patience, self._dwell, self._factor = patience, dwell, factor
        self._asked_at = -1
        self._in_favor = 0  # steps in a row
        self._since = 0  # steps since the last doubling

    def global_batch(self, now: Moment) -> int:
        if now.samples == self._asked_at:  # called twice between two epochs
            return now.current
        self._asked_at = now.samples
        self._since += 1
        wanted = now.noise is not None and self._factor * now.noise >= 2 * now.current
        self._in_favor = self._in_favor + 1 if wanted else 0
        if self._in_favor < self._patience or self._since < self._dwell:
            return now.current
        self._in_favor = self._since = 0
        return now.current * 2

    def state_dict(self) -> dict[str, Any]:
        # Checkpoints of earlier versions have this spelling.
        return {"asked_at": self._asked_at, "in_favour": self._in_favor, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._asked_at = state["asked_at"]
        self._in_favor, self._since = state["in_favour"], state["since"]
