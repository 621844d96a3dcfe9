"""The batch and the learning rate as training proceeds: what may grow, and what follows it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from torchtune_adaptive.common import counted
from torchtune_adaptive.core import Epochs, NoiseScale, Split, StepDone
from torchtune_adaptive.recipe.train.events import Events
from torchtune_adaptive.recipe.train.growth import Grown, Growth
from torchtune_adaptive.recipe.train.learning_rate import LearningRate
from torchtune_adaptive.schedule import Moment

log = logging.getLogger(__name__)


@dataclass
class Adaptation:
    """Decides how large the next step is, and at which learning rate; the same on every rank."""

    growth: Growth
    learning_rate: LearningRate
    noise: NoiseScale | None
    """The estimate of the gradient noise scale; None where it is not measured."""
    epochs: Epochs
    events: Events
    _noise_is_missing: bool = field(init=False, default=False)

    @property
    def split(self) -> Split:
        """How the next step is put together, as long as nothing goes wrong."""
        return self.growth.split

    def begin_epoch(self, epoch: int, samples: int, number: int) -> bool:
        """Ask the user's function before step ``number``; whether the batch has changed."""
        return self._follow(self.growth.as_epoch_begins(epoch, samples), number)

    def before_step(self, epoch: int, used: int, samples: int, number: int) -> bool:
        """Ask the schedule before step ``number``; whether the batch has changed.

        So many samples have been ``used`` of the epoch, and ``samples`` in all.
        """
        moment = Moment(
            samples=samples,
            epochs=self.epochs.progress(epoch, used),
            start=self.growth.start.global_batch,
            current=self.split.global_batch,
            lr_factor=self.learning_rate.base_factor,
            noise=self.noise_scale,
        )
        return self._follow(self.growth.before_step(moment), number)

    def agree(self, samples: int, number: int) -> bool:
        """Do what the user's schedule wants before step ``number``; whether the batch has changed."""
        return self._follow(self.growth.agree(samples), number)

    def _follow(self, grown: Grown | None, number: int) -> bool:
        if grown is not None:
            self.events.grown(grown.before, grown.after, grown.samples, number, grown.reason)
        self.learning_rate.follow(self.split.global_batch, self.noise_scale)
        return grown is not None

    def after_step(self, epoch: int, used: int, outcome: StepDone) -> None:
        """Advance the learning rate, and update the estimate of the gradient noise."""
        self.learning_rate.move_to(self.epochs.position(epoch, used))
        if self.noise is None:
            return
        if outcome.noise is None and not self._noise_is_missing:
            self._noise_is_missing = True
            log.warning(
                "The gradient noise cannot be measured in this run: each step is one micro-batch on one "
                "rank, and there is nothing smaller to compare it with. Use more ranks, or gradient "
                "accumulation."
            )
        self.noise.update(outcome.noise)

    @property
    def noise_scale(self) -> float | None:
        """The gradient noise scale in rows, where it is measured and known."""
        return self.noise.scale_in_rows if self.noise is not None else None

    def announce(self, total_epochs: int) -> None:
        """Log what lies ahead of a run whose batch may grow."""
        steps = self.growth.steps_ahead(self.epochs, total_epochs)
        run = "how many the run takes depends on its course"
        if steps:
            run = f"the run will take {steps}"
        base = counted(total_epochs * self.epochs.base_steps, "step")
        log.info(
            f"batch_size starts at {self.growth.start.micro_batch} and may grow; the largest that fits "
            f"is {self.growth.largest}. The base schedule has {base}; {run}."
        )

    def resume(self, learning_rate: dict[str, Any], noise: dict[str, Any] | None) -> None:
        """Continue from saved states; that of ``growth`` is restored before anything depends on it."""
        self.learning_rate.load_state_dict(learning_rate)
        if self.noise is not None and noise is not None:
            self.noise.load_state_dict(noise)
