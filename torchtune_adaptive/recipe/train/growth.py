"""The batch of the run, which may grow: what a schedule or a user's function wants, within what fits."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import BatchIncreaseError, ConfigError
from torchtune_adaptive.core import Epochs, Ranks, Split
from torchtune_adaptive.recipe.checkpoints.training_state import GrowthState
from torchtune_adaptive.recipe.registry import component
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.schedule import GradientNoise, IncreaseFunction, Moment, Schedule

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grown:
    """A change of the global batch."""

    before: Split
    after: Split
    samples: int
    reason: str


class Growth:
    """Decides how the next step is put together; the same on every rank.

    Args:
        largest: the largest micro-batch that fits, as the search found it; None if there was none.
        grow: the schedule or function that asks for more; None where the batch stays.
        past_memory: True to accumulate gradients where the micro-batch cannot grow any more.
        samples: those that an epoch may use; one step must remain.
        began: how the run began, where it is resumed. On other ranks, too, the batch grows as it would have
            on those.
    """

    def __init__(
        self,
        start: Split,
        largest: int | None,
        grow: Schedule | IncreaseFunction | None,
        past_memory: bool,
        samples: int,
        ranks: Ranks,
        began: GrowthState | None = None,
    ) -> None:
        self.start = start
        self.largest = start.micro_batch if largest is None else largest
        self._was_found = largest is not None
        self.split = start
        self.schedule = grow if isinstance(grow, Schedule) else None
        self._function = None if isinstance(grow, Schedule) else grow
        self._is_ours = type(grow).__module__ == Schedule.__module__
        self._asked: Moment | None = None
        self._answer = 0, ""
        self._differed = False
        self._past_memory = past_memory
        self._samples = samples
        self._ranks = ranks
        self._first = [*_parts(start)] if began is None else began.decided
        _, accumulation, ranks_then = self._first
        self._unit = accumulation * ranks_then
        """Samples by which one more in each micro-batch of the first ranks makes the global batch grow."""
        self._most = self.largest * self._unit if began is None else began.most_global_batch
        self.decisions: list[list[int]] = []
        """Samples and global batch, of each change."""

    # --- what asks for more ---------------------------------------------------------------------------

    def as_epoch_begins(self, epoch: int, samples: int) -> Grown | None:
        """Ask the user's function; what has changed, if anything has."""
        if self._function is None:
            return None
        current = self.split.global_batch // self._unit
        increment = self._agreed(
            _answer(self._function, epoch, current),
            f"epoch {epoch} and batch size {current}",
            "how much to add to the batch size: a whole number, 0 or more",
        )
        if increment == 0:
            return None
        wanted = (current + increment) * self._unit
        if not self._past_memory and wanted > self._most:
            log.warning(
                f"{_name(self._function)} asks for a batch size of {current} + {increment} in epoch {epoch}; "
                f"the largest that fits is {self._most // self._unit}, so it stays at {current}. "
                "(Set adaptive_batching.grow_past_memory=True to grow further by accumulation.)"
            )
            return None
        return self.grow_to(wanted, samples)

    def before_step(self, now: Moment) -> Grown | None:
        """Ask the schedule; what has changed, if anything has. One of the user's own changes nothing yet: it
        may not say the same on all ranks."""
        if self.schedule is None:
            return None
        self._asked, self._answer = now, _answer(self.schedule.global_batch, now)
        return self.grow_to(self.wanted, now.samples) if self._is_ours else None

    @property
    def wanted(self) -> int:
        """The rows of a step that the schedule has asked for on this rank."""
        return self._answer[0]

    @property
    def asks(self) -> bool:
        """Whether this rank has something to say about the batch, which all hear of as the step ends."""
        more = self._usable(self.wanted) > self.split.global_batch
        return not self._is_ours and (more or bool(self._answer[1]))

    def agree(self, samples: int) -> Grown | None:
        """Do what the user's schedule wants, after a step in which a rank ``asks``; on all ranks."""
        must = "the rows of a step over all ranks: a whole number"
        return self.grow_to(self._agreed(self._answer, f"{self._asked}", must), samples)

    def _usable(self, wanted: int) -> int:
        most = self._samples if self._past_memory else min(self._samples, self._most)
        # Equal shares, of the ranks that the run began with.
        return min(wanted, most) // self._first[2] * self._first[2]

    def grow_to(self, wanted: int, samples: int) -> Grown | None:
        """Change to a global batch, or to the largest that may be; what has changed, if anything has."""
        global_batch = self._usable(wanted)
        if global_batch <= self.split.global_batch:  # a batch never shrinks
            return None
        before, start = self.split, self.start
        self.split = Split.of(global_batch, start.ranks, self.largest, start.accumulation)
        self.decisions.append([samples, self.split.global_batch])
        return Grown(before, self.split, samples, _name(self.schedule or self._function))

    @property
    def grows(self) -> bool:
        return self.schedule is not None or self._function is not None

    def _agreed(self, answer: tuple[int, str], asked: str, must: str) -> int:
        """The answer of rank 0, once it is sure that every rank got one."""
        asking = _name(self.schedule or self._function)
        answers = self._ranks.gather(answer)
        for rank, (_, trouble) in enumerate(answers):
            if trouble:
                raise BatchIncreaseError(
                    f"batch_increase_function {asking}, called with {asked}, {trouble} (on rank {rank}). It "
                    f"must return {must}."
                )
        wanted = [number for number, _ in answers]
        if len(set(wanted)) > 1 and not self._differed:
            self._differed = True
            log.warning(
                f"{asking} returned different values on different ranks ({wanted}); using rank 0's."
            )
        return wanted[0]

    # --- ahead, and afterwards ------------------------------------------------------------------------

    def steps_ahead(self, epochs: Epochs, total_epochs: int) -> int | None:
        """The steps of the whole run, where that can be known before it."""
        if self._function is not None or (self.schedule and not self.schedule.predictable):
            return None
        if self.schedule is None:
            return total_epochs * epochs.base_steps
        future = copy.copy(self)
        future.split, future.decisions = self.start, []
        steps = samples = 0
        for epoch in range(total_epochs):
            used = 0
            while True:
                progress = epochs.progress(epoch, used)
                now = Moment(samples, progress, self.start.global_batch, future.split.global_batch)
                future.before_step(now)
                if used + future.split.global_batch > epochs.samples:
                    break
                used += future.split.global_batch
                samples += future.split.global_batch
                steps += 1
                future.grow_to(future.wanted, samples)
        return steps

    def state(self) -> GrowthState:
        start, parts = self.start, _parts(self.start)
        state = GrowthState(
            start=[*parts],
            first=None if [*parts] == self._first else self._first,
            first_batch=None if start.global_batch == math.prod(parts) else start.global_batch,
            global_batch=self.split.global_batch,
            largest=self.largest if self._was_found else None,
            decisions=self.decisions,
            schedule=self.schedule.state_dict() if self.schedule else {},
        )
        return state if state.most_global_batch == self._most else replace(state, most=self._most)

    def resume(self, saved: GrowthState) -> None:
        """Continue from a saved state, on the same number of ranks or another."""
        self.decisions = [list(decision) for decision in saved.decisions]
        if self.schedule is not None:
            self.schedule.load_state_dict(saved.schedule)
        self.split = saved.now_on(self.start.ranks, self.largest)


def _parts(split: Split) -> tuple[int, int, int]:
    return split.micro_batch, split.accumulation, split.ranks


def _answer(ask: Callable[..., Any], *given: Any) -> tuple[int, str]:
    """The number that is the answer, and what is wrong with it."""
    try:
        answer = ask(*given)
    except Exception as error:
        return 0, f"raised {type(error).__name__}: {error}"
    if isinstance(answer, bool) or not isinstance(answer, (int, float)) or answer % 1:
        return 0, f"returned {answer!r}, which is not a whole number"
    return int(answer), "" if answer >= 0 else f"returned {answer!r}: a batch never shrinks"


def _name(asking: object) -> str:
    return getattr(asking, "__qualname__", None) or type(asking).__name__


def batch_increase(asked: Asked) -> Schedule | IncreaseFunction | None:
    """The function or schedule of the config that makes the batch grow."""
    node = asked.cfg.get("batch_increase_function")
    if asked.settings.gradient_noise == "act":
        return GradientNoise()
    if node is None:
        return None
    try:
        built = component(node) if isinstance(node, str) else _instantiate(node)
    except Exception as error:
        raise ConfigError(
            "batch_increase_function",
            node if isinstance(node, str) else OmegaConf.to_container(node),
            f"cannot be made: {type(error).__name__}: {error}",
            "Give the dotted path of a function, or a _component_ with what it takes",
        ) from error
    if not isinstance(built, Schedule) and not callable(built):
        raise ConfigError(
            "batch_increase_function",
            str(node),
            f"gives a {type(built).__name__}, which cannot be called",
            "Give the dotted path of a function f(epoch, current_batch_size), or one of the schedules",
        )
    return built


def _instantiate(node: DictConfig) -> Any:
    """The component, as torchtune makes it, but modules in the working directory count."""
    values = OmegaConf.to_container(node, resolve=True)
    assert isinstance(values, dict)
    make = component(values.pop("_component_"))
    return make(**{str(key): value for key, value in values.items()})
