"""The prediction for a run that generates its rows: the peak and the time of each phase, and what fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torchtune_adaptive.core import Rounding, candidates
from torchtune_adaptive.planner import DeviceLimits, Pace, Peak, Question, Speed, TracedRun, peak
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.asked import ACCUMULATION, Asked
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
class PhaseOfRollout:
    """A phase, as a config has it."""

    size: int
    """The rows in a micro-batch."""
    ceiling: int
    """The most that a search may find."""
    together: int
    """The rows that are split into micro-batches: those of a rollout, or of a step."""
    total: int
    """The rows in a rollout, each as often as it is done."""
    is_fixed: bool = False
    """Whether a search leaves the size as it is."""


@dataclass(frozen=True)
class RolloutQuery:
    """The phases of a config's rollouts, on each rank."""

    rows: int
    """The rows of a rollout."""
    max_new: int
    """Tokens of the longest response."""
    sharded: bool
    """Whether the policy is spread over ranks."""
    phases: Mapping[str, PhaseOfRollout]

    @classmethod
    def of(cls, asked: Asked, ranks: int) -> RolloutQuery:
        """The phases of a checked config."""
        settings, samples = asked.settings, asked["grpo_samples"]
        rows, step = asked["batch_size"] * samples, asked.batch(ranks)
        forward = (asked["forward_batch_size"] or asked["batch_size"]) * samples
        given = {GENERATION: settings.generation_batch_size, SCORING: settings.scoring_batch_size}
        phases = {
            name: PhaseOfRollout(min(size or forward, rows), rows, rows, rows, size is not None)
            for name, size in given.items()
        }
        phases[TRAINING] = PhaseOfRollout(
            step.micro_batch,
            min(settings.ceiling or step.rows, step.rows),
            step.rows,
            rows * asked["ppo_epochs"],
            bool(asked["optimizer_in_bwd"]),
        )
        return cls(rows, asked["max_generated_tokens"], ranks > 1, phases)


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


@dataclass(frozen=True)
class RolloutPlanner:
    """Predicts rollouts from traces.

    Args:
        asked: the phases.
        traces: those of the config.
        length: the tokens of the longest prompt with the longest response.
        device: the memory of the device.
        rounding: the sizes that a search may pick.
        pace: the pace that times follow from, if that is known.
        confirmed: whether to trace the largest sizes themselves.
    """

    asked: RolloutQuery
    traces: Traces
    length: int
    device: DeviceLimits
    rounding: Rounding
    pace: Pace | None
    confirmed: bool

    def predict(self) -> RolloutPrediction:
        phases = tuple(phase.predict() for phase in self.phases())
        picked = {each.name: each.picked.rows for each in phases if each.picked}
        return RolloutPrediction(
            self.asked.rows,
            self.asked.max_new,
            phases,
            self._of_all([each.speed for each in phases]),
            self._of_all([each.speed_picked for each in phases]),
            self._overrides(picked) if len(picked) == len(phases) else "",
        )

    def phases(self) -> tuple[_Phase, ...]:
        """Each phase by itself, in the order in which they follow each other."""
        sharded = self.asked.sharded and not self._gathered_policy_fits()
        generation = SHARDED_GENERATION if sharded else GENERATION
        # With the optimizer in backward, a step is one micro-batch.
        steps = (1,) if self.asked.phases[TRAINING].is_fixed else (1, 2)
        return (
            _Phase(self, GENERATION, [PartTraces(self.traces, generation)], sharded),
            _Phase(self, SCORING, [PartTraces(self.traces, SCORING)]),
            _Phase(self, TRAINING, [PartTraces(self.traces, micro_batches=n) for n in steps]),
        )

    def _gathered_policy_fits(self) -> bool:
        step = self.traces.of_phase(GATHERING, 1, self.length)
        found = peak(self.traces.start_up(self.length), step, 1, self.length, self.device)
        return found.reserved <= self.device.usable_bytes

    def _of_all(self, speeds: Sequence[Speed | None]) -> Speed | None:
        known = [speed for speed in speeds if speed is not None]
        if len(known) < len(speeds):
            return None
        seconds = sum(speed.seconds for speed in known)
        return Speed(
            seconds,
            self.asked.rows * self.length / seconds,
            sum(speed.mfu * speed.seconds for speed in known) / seconds,
            {name: speed.seconds / seconds for name, speed in zip(PHASES, known, strict=True)},
            0.0,
            known[-1].band,
            self.asked.rows / seconds,
        )

    def _overrides(self, picked: Mapping[str, int]) -> str:
        accumulation = -(-self.asked.phases[TRAINING].together // picked[TRAINING])
        return (
            f"{ACCUMULATION}={accumulation} {BLOCK}.generation_batch_size={picked[GENERATION]} "
            f"{BLOCK}.scoring_batch_size={picked[SCORING]}"
        )


class _Phase:
    """One phase: ``traces`` are those of its micro-batches, or those of a step with one and with more."""

    def __init__(
        self,
        planner: RolloutPlanner,
        name: str,
        traces: Sequence[PartTraces],
        sharded: bool = False,
    ) -> None:
        self.name, self._planner, self._traces, self._sharded = name, planner, traces, sharded
        self._about = planner.asked.phases[name]
        self._runs: dict[int, TracedRun] = {}

    def predict(self) -> PhasePrediction:
        about, most = self._about, self._largest()
        picked = self._picked(most)
        return PhasePrediction(
            self.name,
            self.peak(about.size),
            most,
            self.peak(picked) if picked else None,
            self._speed(about.size),
            self._speed(picked) if picked else None,
            self._sharded,
        )

    def run(self, size: int) -> TracedRun:
        """The traces of a micro-batch of this size: steps with more of them hold gradients already."""
        which = min(self._micro_batches(size), len(self._traces)) - 1
        if which not in self._runs:
            self._runs[which] = TracedRun(self._traces[which], self._planner.length)
        return self._runs[which]

    def _micro_batches(self, size: int) -> int:
        return -(-self._about.together // size)

    def peak(self, size: int) -> Peak:
        """The peak with micro-batches of a size."""
        return self.run(size).peak(size, self._planner.length, self._planner.device)

    def _fits(self, size: int) -> bool:
        return self.peak(size).reserved <= self._planner.device.usable_bytes

    def _largest(self) -> int:
        most, planner = self._about.ceiling, self._planner
        if most == self._about.together:
            # Of training, this is a step of its own: without gradients of an earlier micro-batch.
            if (fits := self._fits(most)) or most == 1:
                return most if fits else 0
            most -= 1
        run = self.run(most)
        return run.largest(planner.length, planner.device, most, planner.confirmed)

    def _picked(self, most: int) -> int:
        if self._about.is_fixed:
            return self._about.size if self._about.size <= most else 0
        sizes = candidates(self._planner.rounding, most, self._about.together)
        return max(sizes, default=0)

    def _speed(self, size: int) -> Speed | None:
        """The speed of whole rollouts with micro-batches of a size."""
        planner, about = self._planner, self._about
        parts, rounds = 1, self._micro_batches(size)
        pace = planner.pace
        if self.name == GENERATION:
            parts = planner.asked.max_new
            pace = pace and replace(pace, compiled=False)
        elif self.name == TRAINING:
            parts, rounds = rounds, about.total // about.together
        question = Question(planner.device, size, planner.length, parts, pace)
        one = self.run(size).speed(question, size)
        if one is None:
            return None
        seconds = one.seconds * rounds
        rows = planner.asked.rows
        return replace(
            one,
            seconds=seconds,
            tokens_per_second_per_gpu=rows * planner.length / seconds,
            rows_per_second_per_gpu=rows / seconds,
        )
