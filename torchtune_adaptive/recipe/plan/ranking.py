"""The fastest configuration of the same training: candidates by predicted speed, pruned by memory.

Tracing every candidate would take minutes. What a candidate's step takes is first estimated. Then candidates
are traced themselves, from the one that should be fastest, until one fits that no other can beat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.core import Choice, knobs, strategies
from torchtune_adaptive.planner import Speed, steps_by_choice
from torchtune_adaptive.recipe.plan.predict import Prediction
from torchtune_adaptive.recipe.plan.query import Query
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.knob_table import (
    KNOBS,
    KNOBS_BY_KEY,
    Change,
    choices,
    configured_choice,
    may_be_changed,
    with_choice,
)
from torchtune_adaptive.recipe.tracing.traces import Traces

KEEPS_WEIGHTS = (
    "compile: a layer that is not checkpointed keeps the weights that it has dequantized for backward, which "
    "is counted"
)
_MOST_TRACED = 10
"""Number of candidates that are traced at most once one fits, for each model that has to be built."""
_CLOSE = 0.005
"""Share by which an estimate may exceed the best and still be checked by a trace."""
_SAME = 0.002
"""Share below which a gain is none."""
_HOPELESS = 1.12
"""Multiple of the usable memory above which an estimated peak rules a candidate out."""


@dataclass(frozen=True)
class Candidate:
    """A way to configure the same training."""

    asked: Asked
    """The whole config."""
    changes: tuple[Change, ...]
    """Differences from the user's config."""
    seconds: float
    """Predicted seconds for a step of the whole global batch."""
    tokens_per_second_per_gpu: float
    reserved: int | None
    """Peak in bytes, if it was traced."""
    fits: bool | None
    """Whether it fits; None if nothing was traced that tells."""
    remark: str = ""
    """What to know about its changes, if anything."""


def rank_candidates(
    query: Query, may_change: str | tuple[str, ...], with_margin: bool = False
) -> list[Candidate]:
    """Candidates that need no other model than the query's, from the fastest; the query's own among them.

    Call it in a process that does nothing else: see ``workers``.

    Args:
        query: the config, with its micro-batch and its pace.
        may_change: the setting ``adaptive_batching.may_change``.
        with_margin: whether to find the fastest that fits in spite of the prediction's error, too; a run
            tries its choice, and needs none.

    Raises:
        NoPrediction: nothing is known about the speed of the device.
    """
    ranked, estimated, traced = _ranked(query, may_change, with_margin)
    own = configured_choice(query.asked, query.ranks)
    return [
        _candidate(query, one, estimated, traced)
        for one in ranked
        # Of how many layers may be checkpointed, what was traced says enough.
        if one == own or one in traced or not knobs.layers_of(one[knobs.CHECKPOINT])
    ]


def ranked_choices(query: Query, may_change: str | tuple[str, ...]) -> list[tuple[Choice, float]]:
    """All choices that need no other model than the query's, from the fastest, and their seconds."""
    ranked, estimated, traced = _ranked(query, may_change)
    seconds = {one: traced[one].seconds if one in traced else estimated[one] for one in ranked}
    return [(one, seconds[one]) for one in ranked]


def _ranked(
    query: Query, may_change: str | tuple[str, ...], with_margin: bool = False
) -> tuple[list[Choice], dict[Choice, float], dict[Choice, steps_by_choice.TracedStep]]:
    """The choices from the one that should be fastest, their seconds as estimated, and what was traced."""
    if query.pace is None:
        unknown = "Nothing is known about the speed of this device. Name a GPU with --gpu."
        raise NoPrediction(unknown)
    traces = query.traces()
    possible = possible_choices(query, may_change, traces)
    steps = steps_with(query, possible, traces)
    ranked, estimated = steps.ranked(possible)
    device = query.device
    traced = traced_until_one_fits(steps, ranked, estimated, device.usable_bytes)
    if with_margin:
        traced |= traced_until_one_fits(steps, ranked, estimated, device.surely_usable_bytes)
    traces.remember()
    return ranked, estimated, traced


def possible_choices(
    query: Query, may_change: str | tuple[str, ...], traces: Traces
) -> list[Choice]:
    """What may be chosen without another model, the query's own the first."""
    traces.start_up(query.length)  # builds the model, and its layers are counted
    return choices(query.asked, query.ranks, may_change, layers=traces.layers, switches_only=True)


def steps_with(
    query: Query, all_choices: list[Choice], traces: Traces
) -> steps_by_choice.StepsByChoice:
    """The query's steps with each choice, its own the first."""
    assert query.pace is not None
    return steps_by_choice.StepsByChoice(
        traces,
        all_choices,
        rows=query.rows,
        length=query.length,
        rows_per_step=query.rows_per_step,
        device=query.device,
        pace=query.pace,
    )


def traced_until_one_fits(
    steps: steps_by_choice.StepsByChoice,
    ranked: list[Choice],
    estimated: dict[Choice, float],
    usable_bytes: int,
) -> dict[Choice, steps_by_choice.TracedStep]:
    """Trace candidates, from the one that should be fastest, until no other can beat one that fits."""
    traced: dict[Choice, steps_by_choice.TracedStep] = {}
    known: strategies.WaysThatFit[Choice] = strategies.WaysThatFit(
        Choice.needs_as_much_as, Choice.of_any_layers
    )
    known.too_large += [one.choice for one in steps.leanest if one.reserved > usable_bytes]
    if steps.many_sizes:
        known.too_large += _sizes_that_are_too_large(steps, ranked, usable_bytes)

    def next_to_trace(one: Choice) -> Choice | None:
        """The one that says most about whether this one fits; None if it is hopeless."""
        peaks = {
            each: steps.estimated_peak(each, traced.values())
            for each in known.open_below(one, ranked)
        }
        if (peaks[one] or 0.0) > usable_bytes * _HOPELESS:
            return None
        if peaks[one] is None:
            return known.next(one, ranked)
        # Peaks are nearly linear in the number of layers: so first where the line says, then beside it.
        line = {each: peak for each, peak in peaks.items() if peak is not None}
        return next((each for each in line if line[each] <= usable_bytes), [*line][-1])

    def best_of(choices: list[Choice]) -> float:
        seen = (traced[one] for one in choices if one in traced)
        return min((one.seconds for one in seen if one.reserved <= usable_bytes), default=inf)

    def trace_until_one_fits(choices: list[Choice], no_slower_than: float = inf) -> None:
        one_fits = False
        for one in choices:
            enough = len(traced) >= _MOST_TRACED or estimated[one] > best_of(choices) * (1 + _CLOSE)
            if estimated[one] > no_slower_than or (one_fits and enough):
                break
            while known.fits(one) is None and (each := next_to_trace(one)) is not None:
                traced[each] = steps.traced(each)
                known.learn(each, traced[each].reserved <= usable_bytes)
            one_fits = one_fits or bool(known.fits(one))

    trace_until_one_fits(ranked)
    best = best_of(ranked)
    if best < inf and steps.many_sizes:  # its own size is preferred to one that is hardly faster
        own_size = [one for one in ranked if steps.has_own_size(one)]
        trace_until_one_fits(own_size, best * (1 + Speed.CLOSE))
    return traced


def _sizes_that_are_too_large(
    steps: steps_by_choice.StepsByChoice, ranked: list[Choice], usable_bytes: int
) -> list[Choice]:
    """The choices, by loss, that need the least memory of the smallest micro-batch of which nothing fits."""
    found = []
    for loss in {one.get(knobs.LOSS) for one in ranked}:
        same_loss = [one for one in ranked if one.get(knobs.LOSS) == loss]
        for size in sorted({one[knobs.MICRO_BATCH] for one in ranked}):
            lean = Choice.leanest([one for one in same_loss if one[knobs.MICRO_BATCH] == size])[0]
            if steps.traced(lean).reserved > usable_bytes:
                found.append(lean)
                break
    return found


def _candidate(
    query: Query,
    choice: Choice,
    estimated: dict[Choice, float],
    traced: dict[Choice, steps_by_choice.TracedStep],
) -> Candidate:
    changed = with_choice(query.asked, query.ranks, choice)
    found = traced.get(choice)
    seconds = found.seconds if found else estimated[choice]
    per_second = query.rows_per_step * query.length / seconds / query.asked.holders
    reserved = found.reserved if found else None
    fits = reserved <= query.device.usable_bytes if reserved is not None else None
    return Candidate(changed, (), seconds, per_second, reserved, fits)


def other_builds(asked: Asked, ranks: int, may_change: str | tuple[str, ...]) -> Iterator[Asked]:
    """The same with other values of knobs that are no switches, one at a time."""
    own = configured_choice(asked, ranks)
    for knob in KNOBS:
        if knob.switch or knob.key not in own or not may_be_changed(knob, may_change):
            continue
        for value in knob.values(asked, ranks):
            if value != own[knob.key]:
                yield with_choice(asked, ranks, own | {knob.key: value})


def merged(
    asked: Asked, found: Iterable[list[Candidate]], prediction: Prediction, usable_bytes: int
) -> list[Candidate]:
    """The candidates of all builds from the fastest, with what differs from the user's config; ``prediction``
    is for that one."""
    everything = []
    for one in (one for candidates in found for one in candidates):
        changed = _changes(asked, one.asked, prediction.ranks)
        if not changed and (speed := prediction.speed) is not None:
            per_second, reserved = speed.tokens_per_second_per_gpu, prediction.configured.reserved
            fits = reserved <= usable_bytes
            one = Candidate(one.asked, (), speed.seconds, per_second, reserved, fits)
        everything.append(replace(one, changes=changed, remark=_remark(one, changed)))
    return sorted(everything, key=lambda one: one.seconds)


def _remark(one: Candidate, changed: Iterable[Change]) -> str:
    compiles = any(change.key == knobs.COMPILE and change.new for change in changed)
    return KEEPS_WEIGHTS if compiles and one.asked.quantized_weights else ""


def _changes(asked: Asked, changed: Asked, ranks: int) -> tuple[Change, ...]:
    keys = configured_choice(asked, ranks).keys() | configured_choice(changed, ranks).keys()
    knobs_set = [knob for key, knob in KNOBS_BY_KEY.items() if key in keys]
    pairs = ((knob, knob.configured(asked), knob.configured(changed)) for knob in knobs_set)
    return tuple(Change(knob.key, now, new, knob.effect) for knob, now, new in pairs if now != new)


def chosen(candidates: Iterable[Candidate]) -> Candidate | None:
    """The fastest of those that were seen to fit; of those that are as fast, what changes least. So it is
    with each micro-batch, and then among those that are too close to call."""
    best_of_each = _best_of_each_size(candidates)
    best = min((one.seconds for one in best_of_each), default=0.0)
    close = [one for one in best_of_each if one.seconds <= best * (1 + Speed.CLOSE)]
    return min(close, key=lambda one: (len(one.changes), one.seconds), default=None)


def too_close_to_call(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The best with other micro-batches, where it may be faster than the choice."""
    candidates = list(candidates)
    if (choice := chosen(candidates)) is None:
        return []
    others = (one for one in _best_of_each_size(candidates) if one is not choice)
    return [one for one in others if one.seconds <= choice.seconds * (1 + Speed.CLOSE)]


def _best_of_each_size(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The best with each micro-batch, compiled or not, from the fastest. Those differ only in what is done
    less, so that a small difference is one."""
    by_kernels: dict[tuple[Any, ...], list[Candidate]] = {}
    for one in candidates:
        if one.fits:
            kernels = one.asked["batch_size"], bool(one.asked["compile"])
            by_kernels.setdefault(kernels, []).append(one)
    found = []
    for alike in by_kernels.values():
        best = min(one.seconds for one in alike)
        as_fast = [one for one in alike if one.seconds <= best * (1 + _SAME)]
        found.append(min(as_fast, key=lambda one: (len(one.changes), one.reserved)))
    return sorted(found, key=lambda one: one.seconds)
