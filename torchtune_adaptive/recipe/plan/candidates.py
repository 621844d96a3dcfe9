"""The fastest configuration of the same training: candidates by predicted speed, pruned by memory.

Tracing every candidate would take minutes. What a candidate's step takes is first estimated: steps that
repeat less follow from the one that repeats everything, by leaving operations out, and the other knobs are
taken to add up. Then candidates are traced themselves, from the one that should be fastest, until one fits
that no other can beat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.core import (
    CHECKPOINT,
    LOSS,
    OFFLOADING,
    RECOMPUTE_LOSS,
    RESHARD,
    Choice,
)
from torchtune_adaptive.planner import (
    ATTENTION,
    ELSEWHERE,
    GEMM,
    DifferentOperations,
    Operation,
    StepOperations,
    TracedRun,
    at_rows,
    host_seconds_to_repeat,
    peak,
    step_time,
)
from torchtune_adaptive.planner import seconds as seconds_of
from torchtune_adaptive.recipe.plan.predict import Prediction, Query
from torchtune_adaptive.recipe.settings.knob_table import (
    KNOBS,
    KNOBS_BY_KEY,
    MICRO_BATCH,
    Change,
    choices,
    configured_choice,
    may_be_changed,
    with_choice,
)
from torchtune_adaptive.recipe.tracing.traces import Traces

_MOST_TRACED = 10
"""Candidates that are traced at most, for each model that has to be built."""
_CLOSE = 0.005
"""Estimates this close to the best are checked by a trace."""
_SAME = 0.002
"""A smaller gain is none."""
_HOPELESS = 1.12
"""Estimated peaks above so many times the usable memory are not."""
_OFFLOADING_COSTS = 1.05
"""Estimate; a candidate that offloads is traced before it is chosen."""


@dataclass(frozen=True)
class Candidate:
    """A way to configure the same training."""

    cfg: dict[str, Any]
    """The whole config."""
    changes: tuple[Change, ...]
    """What differs from the user's config."""
    seconds: float
    """Predicted for a step of the whole global batch."""
    tokens_per_second_per_gpu: float
    reserved: int | None
    """The peak, if it was traced."""
    fits: bool | None
    """None if nothing was traced that tells."""


@dataclass(frozen=True)
class _Traced:
    choice: Choice
    seconds: float
    reserved: int


def rank_candidates(
    query: Query, may_change: str | tuple[str, ...], traces: Traces | None = None
) -> list[Candidate]:
    """Candidates that need no other model than the query's, from the fastest; the query's own among them.

    Call it in a process that does nothing else: see ``workers``.

    Args:
        query: the config, with its micro-batch and its pace.
        may_change: as ``adaptive_batching.may_change``.
        traces: the query's, if there are any yet.

    Raises:
        NoPrediction: nothing is known about the speed of the device.
    """
    if query.pace is None:
        raise NoPrediction(
            "Nothing is known about the speed of this device. Name a GPU with --gpu."
        )
    cfg = OmegaConf.create(query.cfg)
    assert isinstance(cfg, DictConfig)
    own, *others = choices(cfg, query.ranks, may_change, switches_only=True)
    traces = traces or query.traces()
    steps = Steps(query, traces, own, many_sizes=MICRO_BATCH in _varied([own, *others]))
    ranked, estimated = steps.ranked([own, *others])
    traced = traced_until_one_fits(steps, ranked, estimated, query.device.usable_bytes)
    traces.remember()
    return [_candidate(query, cfg, one, estimated, traced) for one in ranked]


def traced_until_one_fits(
    steps: Steps, ranked: list[Choice], estimated: dict[Choice, float], usable_bytes: int
) -> dict[Choice, _Traced]:
    """Trace candidates, from the one that should be fastest, until no other can beat one that fits."""
    traced: dict[Choice, _Traced] = {}
    best: float | None = None
    too_large = [one.choice for one in steps.leanest if one.reserved > usable_bytes]
    if MICRO_BATCH in _varied(ranked):
        too_large += _sizes_that_are_too_large(steps, ranked, usable_bytes)
    for one in ranked:
        if best is not None and estimated[one] > best * (1 + _CLOSE):
            break
        if len(traced) == _MOST_TRACED and best is not None:
            break
        if any(one.needs_as_much_as(other) for other in too_large):
            continue
        guess = steps.estimated_peak(one, traced.values())
        if guess is not None and guess > usable_bytes * _HOPELESS:
            continue
        found = traced[one] = steps.traced(one)
        if found.reserved > usable_bytes:
            too_large.append(one)
        elif best is None or found.seconds < best:
            best = found.seconds
    return traced


def _sizes_that_are_too_large(
    steps: Steps, ranked: list[Choice], usable_bytes: int
) -> list[Choice]:
    """By loss, what needs least memory of the smallest micro-batch of which nothing fits."""
    found = []
    for loss in {one.get(LOSS) for one in ranked}:
        for size in sorted({one[MICRO_BATCH] for one in ranked}):
            alike = [one for one in ranked if (one[MICRO_BATCH], one.get(LOSS)) == (size, loss)]
            lean = Choice.leanest(alike)[0]
            if steps.traced(lean).reserved > usable_bytes:
                found.append(lean)
                break
    return found


def _candidate(
    query: Query,
    cfg: DictConfig,
    choice: Choice,
    estimated: dict[Choice, float],
    traced: dict[Choice, _Traced],
) -> Candidate:
    changed: Any = OmegaConf.to_container(with_choice(cfg, query.ranks, choice), resolve=True)
    found = traced.get(choice)
    seconds = found.seconds if found else estimated[choice]
    tokens = query.rows_per_step * query.length
    return Candidate(
        cfg=changed,
        changes=(),
        seconds=seconds,
        tokens_per_second_per_gpu=tokens / seconds,
        reserved=found.reserved if found else None,
        fits=found.reserved <= query.device.usable_bytes if found else None,
    )


class Steps:
    """The steps of one model with other values of its switches: traced, or estimated.

    Args:
        query: the config.
        traces: its traces.
        own: its choice.
        many_sizes: whether there are candidates with other micro-batches.
    """

    def __init__(self, query: Query, traces: Traces, own: Choice, many_sizes: bool) -> None:
        self.query = query
        self._traces = traces
        self._own = own
        self._many_sizes = many_sizes
        self._rows = query.rows_per_step
        self._beginning = traces.start_up(query.length)
        self._bases: dict[tuple[Any, ...], tuple[StepOperations, float]] = {}
        self.leanest: list[_Traced] = []
        """Steps that repeat all they can, where they had to be traced."""
        self._exact: dict[Choice, _Traced] = {}

    # --- traced ---------------------------------------------------------------------------------

    def traced(self, choice: Choice) -> _Traced:
        """What a step takes, from a trace of that very step."""
        if choice not in self._exact:
            size, length = self._size(choice), self.query.length
            micro_batches = self._rows // size
            step = self._traces.step(size, length, choice, min(2, micro_batches))
            reserved = peak(self._beginning, step, size, length, self.query.device).reserved
            assert step.operations is not None
            seconds = self._replayed(step.operations, micro_batches)
            self._exact[choice] = _Traced(choice, seconds, reserved)
        return self._exact[choice]

    def _size(self, choice: Choice) -> int:
        return int(choice.get(MICRO_BATCH, self.query.rows))

    def _replayed(self, step: StepOperations, micro_batches: int) -> float:
        pace = self.query.pace
        assert pace is not None
        time = step_time(step, pace.speeds, self.query.ranks, micro_batches, pace.compiled)
        return time.seconds * (pace.correction or 1.0)

    # --- estimated ------------------------------------------------------------------------------

    def ranked(self, candidates: list[Choice]) -> tuple[list[Choice], dict[Choice, float]]:
        """The candidates from the one that should be fastest, and the seconds of each."""
        estimated = {one: self.estimated_seconds(one) for one in candidates}
        return sorted(candidates, key=lambda one: estimated[one]), estimated

    def estimated_seconds(self, choice: Choice) -> float:
        """What a step should take."""
        size = self._size(choice)
        # Only a loss in chunks can be repeated, so what is not repeated depends on the loss.
        step, lean = self._base(size, *self._changed(choice, LOSS))
        found = lean - self._rows // size * self._not_repeated(step, choice)
        if change := self._changed(choice, RESHARD):
            found += self._base(size, *change)[1] - self._base(size)[1]
        return found * (_OFFLOADING_COSTS if choice.get(OFFLOADING) else 1.0)

    def _changed(self, choice: Choice, key: str) -> tuple[Any, ...]:
        """The knob and its value, if it is not the config's own."""
        return (key, choice[key]) if choice.get(key) != self._own.get(key) else ()

    def _base(self, size: int, *change: Any) -> tuple[StepOperations, float]:
        """The step that repeats all it can, with at most one other knob changed; and its seconds."""
        if (size, *change) not in self._bases:
            choice = self._own | {CHECKPOINT: "all"} | dict([change] if change else [])
            if RECOMPUTE_LOSS in choice:
                choice |= {RECOMPUTE_LOSS: "Chunked" in str(choice.get(LOSS, "Chunked"))}
            if choice.get(OFFLOADING):
                choice |= {OFFLOADING: False}
            if not self._many_sizes:
                self.leanest.append(self.traced(choice))
            step = self._operations(choice, size)
            self._bases[size, *change] = (step, self._replayed(step, self._rows // size))
        return self._bases[size, *change]

    def _operations(self, choice: Choice, size: int) -> StepOperations:
        def noted(rows: int) -> StepOperations:
            count = 2 if self._many_sizes else min(2, self._rows // size)
            found = self._traces.step(rows, self.query.length, choice, count).operations
            assert found is not None
            return found

        few, many = TracedRun.ROWS
        if not self._many_sizes or size < few:
            return noted(size)
        try:
            return at_rows(noted(few), noted(many), (size - few) / (many - few))
        except DifferentOperations:
            return noted(size)

    def _not_repeated(self, step: StepOperations, choice: Choice) -> float:
        """Seconds of a micro-batch's operations that the step repeats, and the choice does not."""
        pace = self.query.pace
        assert pace is not None
        last = step.micro_batches[-1]
        saved = sum(
            seconds_of(one, pace.speeds, self.query.ranks, pace.compiled)
            for one in last
            if one.repeats and not _repeats(one, choice)
        )
        if pace.speeds.is_host:  # elsewhere the device is busy meanwhile
            saved += host_seconds_to_repeat(last, pace.speeds, False)
            repeated = (one for one in last if not one.repeats or _repeats(one, choice))
            by_operation = choice[CHECKPOINT] == "operations"
            saved -= host_seconds_to_repeat(repeated, pace.speeds, by_operation)
        return (pace.correction or 1.0) * saved

    def estimated_peak(self, choice: Choice, traced: Iterable[_Traced]) -> float | None:
        """The peak, if it lies between two that are known: of a step that keeps more layers' activations and
        is otherwise the same, and of one that keeps fewer."""
        kept = _kept(choice)
        if kept is None:
            return None
        known = [(_kept(one.choice), one) for one in (*self.leanest, *traced)]
        more = [
            (share, one.reserved)
            for share, one in known
            if share is not None
            and share >= kept
            and _differ_only_in(one.choice, choice, CHECKPOINT)
        ]
        fewer = [
            (share, one.reserved)
            for share, one in known
            if share is not None
            and share < kept
            and _differ_only_in(one.choice, choice, CHECKPOINT, RECOMPUTE_LOSS)
        ]
        if not more or not fewer:
            return None
        (high, most), (low, least) = min(more), max(fewer)
        return least + (most - least) * (kept - low) / (high - low)


def _differ_only_in(one: Choice, other: Choice, *keys: str) -> bool:
    return all(one[key] == value or key in keys for key, value in other.items())


def _repeats(one: Operation, choice: Choice) -> bool:
    """Whether a step with this choice has an operation of the one that repeats all it can."""
    if one.repeats == ELSEWHERE:
        return bool(choice.get(RECOMPUTE_LOSS, True))
    if choice[CHECKPOINT] == "operations":
        return one.kind not in (GEMM, ATTENTION)
    every = choice.checkpoints_every
    return every is not None and one.repeats % every == 0


def _kept(choice: Choice) -> float | None:
    """The share of layers whose activations are kept, if each is kept as a whole or not."""
    if choice[CHECKPOINT] == "operations":
        return None
    every = choice.checkpoints_every
    return 1.0 if every is None else 1.0 - 1.0 / every


def _varied(all_choices: list[Choice]) -> set[str]:
    return {key for one in all_choices for key in one if one[key] != all_choices[0][key]}


# --- what needs another model to be built ---------------------------------------------------------


def other_builds(
    cfg: DictConfig, ranks: int, may_change: str | tuple[str, ...]
) -> Iterator[DictConfig]:
    """The config with other values of knobs that are no switches, one at a time."""
    own = configured_choice(cfg, ranks)
    for knob in KNOBS:
        if knob.switch or knob.key not in own or not may_be_changed(knob, may_change):
            continue
        for value in knob.values(cfg, ranks):
            if value != own[knob.key]:
                yield with_choice(cfg, ranks, own | {knob.key: value})


def merged(
    cfg: DictConfig, found: Iterable[list[Candidate]], prediction: Prediction, usable_bytes: int
) -> list[Candidate]:
    """The candidates of all builds from the fastest, with what differs from the user's config.

    Args:
        cfg: the user's config.
        found: the candidates of each build.
        prediction: for the user's config.
        usable_bytes: what a peak may reach.
    """
    everything = []
    for one in (one for candidates in found for one in candidates):
        changed = _changes(cfg, OmegaConf.create(one.cfg), prediction.ranks)
        if not changed and prediction.speed is not None:
            each, reserved = prediction.speed, prediction.configured.reserved
            one = replace(
                one,
                seconds=each.seconds,
                tokens_per_second_per_gpu=each.tokens_per_second_per_gpu,
                reserved=reserved,
                fits=reserved <= usable_bytes,
            )
        everything.append(replace(one, changes=changed))
    return sorted(everything, key=lambda one: one.seconds)


def _changes(cfg: DictConfig, changed: Any, ranks: int) -> tuple[Change, ...]:
    keys = configured_choice(cfg, ranks).keys() | configured_choice(changed, ranks).keys()
    found = []
    for key in KNOBS_BY_KEY:
        knob = KNOBS_BY_KEY[key]
        if key in keys and knob.configured(cfg) != knob.configured(changed):
            found.append(Change(key, knob.configured(cfg), knob.configured(changed), knob.effect))
    return tuple(found)


def chosen(candidates: Iterable[Candidate]) -> Candidate | None:
    """The fastest of those that were seen to fit; of those that are as fast, what changes least."""
    fitting = [one for one in candidates if one.fits]
    best = min((one.seconds for one in fitting), default=0.0)
    as_fast = [one for one in fitting if one.seconds <= best * (1 + _SAME)]
    return min(as_fast, key=lambda one: (len(one.changes), one.reserved), default=None)
