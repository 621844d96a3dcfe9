"""The prediction for a run that generates its rows: the peak and the time of each phase, and what fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchtune_adaptive.core import candidates
from torchtune_adaptive.planner import Peak, Question, Speed, TracedRun, peak
from torchtune_adaptive.recipe.plan.query import Query
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.asked import ACCUMULATION
from torchtune_adaptive.recipe.settings.phase_names import (
    GATHERING,
    GENERATION,
    PHASES,
    SCORING,
    SHARDED_GENERATION,
    TRAINING,
)
from torchtune_adaptive.recipe.tracing.traces import PartTraces, Traces


@dataclass(frozen=True)
class PhasePrediction:
    """The prediction for one phase of a rollout."""

    name: str
    configured: Peak
    largest: int
    """Largest micro-batch that fits, of those that there may be; 0 if none does."""
    picked: Peak | None
    """Peak at the micro-batch that a search picks; None if none fits."""
    speed: Speed | None
    """Speed of this phase with micro-batches as configured; its seconds are those of a whole rollout."""
    speed_picked: Speed | None
    """The same with those that a search picks."""
    sharded: bool = False
    """Whether it generates with sharded weights, because the whole policy does not fit."""


@dataclass(frozen=True)
class RolloutPrediction:
    """The prediction for the phases of a rollout: generation, scoring, training."""

    rows: int
    """The rows of a rollout on each rank."""
    max_new: int
    """Tokens of the longest response."""
    phases: tuple[PhasePrediction, ...]
    speed: Speed | None
    """Speed of whole rollouts with micro-batches as configured. Its parts are the phases."""
    speed_picked: Speed | None
    """The same with those that a search picks; None if some phase does not fit."""
    overrides: str
    """Overrides for the sizes that a search picks; empty if some phase does not fit."""

    @property
    def limiting(self) -> PhasePrediction:
        """The phase with the highest peak at the configured sizes. Its verdict is that of the rollout."""
        return max(self.phases, key=lambda phase: phase.configured.reserved)


class RolloutPlanner:
    """Predicts rollouts of a config from its traces."""

    def __init__(self, query: Query, traces: Traces) -> None:
        self.query, self.traces = query, traces
        self.rows: int = query.asked["batch_size"] * query.asked["grpo_samples"]
        """The rows of a rollout on each rank."""

    def predict(self) -> RolloutPrediction:
        phases = tuple(phase.predict() for phase in self.phases())
        picked = {each.name: each.picked.rows for each in phases if each.picked}
        return RolloutPrediction(
            self.rows,
            self.query.asked["max_generated_tokens"],
            phases,
            self._of_all([each.speed for each in phases]),
            self._of_all([each.speed_picked for each in phases]),
            self._overrides(picked) if len(picked) == len(phases) else "",
        )

    def phases(self) -> tuple[_Phase, ...]:
        """Each phase by itself, in the order in which they follow each other."""
        asked, rows, ranks = self.query.asked, self.rows, self.query.ranks
        settings, step = asked.settings, asked.batch(ranks)
        forward = (asked["forward_batch_size"] or asked["batch_size"]) * asked["grpo_samples"]
        sharded = ranks > 1 and not self._gathered_policy_fits()

        def once(name: str, part: str, given: int | None) -> _Phase:
            """A phase that goes over the rows once, and that a search leaves as it is ``given``."""
            traces, size = [PartTraces(self.traces, part)], min(given or forward, rows)
            return _Phase(self, name, traces, size, rows, rows, is_fixed=given is not None)

        in_backward = bool(asked["optimizer_in_bwd"])
        # With the optimizer in backward, a step is one micro-batch.
        numbers = (1,) if in_backward else (1, 2)
        generation = SHARDED_GENERATION if sharded else GENERATION
        return (
            once(GENERATION, generation, settings.generation_batch_size),
            once(SCORING, SCORING, settings.scoring_batch_size),
            _Phase(
                self,
                TRAINING,
                [PartTraces(self.traces, micro_batches=n) for n in numbers],
                size=step.micro_batch,
                ceiling=min(settings.ceiling or step.rows, step.rows),
                together=step.rows,
                is_fixed=in_backward,
                steps=rows * asked["ppo_epochs"] // step.rows,
            ),
        )

    def _gathered_policy_fits(self) -> bool:
        length, device = self.query.length, self.query.device
        step = self.traces.of_phase(GATHERING, 1, length)
        found = peak(self.traces.start_up(length), step, 1, length, device)
        return found.reserved <= device.usable_bytes

    def _of_all(self, speeds: Sequence[Speed | None]) -> Speed | None:
        known = [speed for speed in speeds if speed is not None]
        if len(known) < len(speeds):
            return None
        seconds = sum(speed.seconds for speed in known)
        return Speed(
            seconds,
            self.rows * self.query.length / seconds,
            sum(speed.mfu * speed.seconds for speed in known) / seconds,
            {name: speed.seconds / seconds for name, speed in zip(PHASES, known, strict=True)},
            0.0,
            known[-1].band,
            self.rows / seconds,
        )

    def _overrides(self, picked: Mapping[str, int]) -> str:
        accumulation = -(-self.query.asked.batch(self.query.ranks).rows // picked[TRAINING])
        return (
            f"{ACCUMULATION}={accumulation} {BLOCK}.generation_batch_size={picked[GENERATION]} "
            f"{BLOCK}.scoring_batch_size={picked[SCORING]}"
        )


@dataclass
class _Phase:
    """One phase, as the config has it, on each rank."""

    planner: RolloutPlanner
    name: str
    traces: Sequence[PartTraces]
    """Those of its micro-batches, or those of a step with one and with more."""
    size: int
    """The rows in a micro-batch."""
    ceiling: int
    """The most that a search may find."""
    together: int
    """The rows that are split into micro-batches: those of a rollout, or of a step."""
    is_fixed: bool
    """Whether a search leaves the size as it is."""
    steps: int = 1
    """Steps in a rollout."""
    _runs: dict[int, TracedRun] = field(default_factory=dict)

    def predict(self) -> PhasePrediction:
        most = self._largest()
        picked = self._picked(most)
        return PhasePrediction(
            self.name,
            self.peak(self.size),
            most,
            self.peak(picked) if picked else None,
            self._speed(self.size),
            self._speed(picked) if picked else None,
            self.traces[0].phase == SHARDED_GENERATION,
        )

    def run(self, size: int) -> TracedRun:
        """The traces of a micro-batch of this size: steps with more of them hold gradients already."""
        which = min(self._micro_batches(size), len(self.traces)) - 1
        if which not in self._runs:
            self._runs[which] = TracedRun(self.traces[which], self.planner.query.length)
        return self._runs[which]

    def _micro_batches(self, size: int) -> int:
        return -(-self.together // size)

    def peak(self, size: int) -> Peak:
        """The peak with micro-batches of a size."""
        query = self.planner.query
        return self.run(size).peak(size, query.length, query.device)

    def _largest(self) -> int:
        most, query = self.ceiling, self.planner.query
        if most == self.together:
            # Of training, this is a step of its own: without gradients of an earlier micro-batch.
            fits = self.peak(most).reserved <= query.device.usable_bytes
            if fits or most == 1:
                return most if fits else 0
            most -= 1
        run = self.run(most)
        return run.largest(query.length, query.device, most, query.confirmed)

    def _picked(self, most: int) -> int:
        if self.is_fixed:
            return self.size if self.size <= most else 0
        return max(candidates(self.planner.query.rounding, most, self.together), default=0)

    def _speed(self, size: int) -> Speed | None:
        """The speed of whole rollouts with micro-batches of a size."""
        query, rows = self.planner.query, self.planner.rows
        parts, rounds, pace = 1, self._micro_batches(size), query.pace
        if self.name == GENERATION:
            parts = query.asked["max_generated_tokens"]
            pace = pace and replace(pace, compiled=False)
        elif self.name == TRAINING:
            parts, rounds = rounds, self.steps
        question = Question(query.device, size, query.length, parts, pace)
        one = self.run(size).speed(question, size)
        if one is None:
            return None
        seconds = one.seconds * rounds
        return replace(
            one,
            seconds=seconds,
            tokens_per_second_per_gpu=rows * query.length / seconds,
            rows_per_second_per_gpu=rows / seconds,
        )
