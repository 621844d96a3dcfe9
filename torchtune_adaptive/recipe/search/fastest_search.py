"""Choose the memory knobs that train fastest within the memory there is, by timing a few real steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torchtune_adaptive.common import ConfigError, counted
from torchtune_adaptive.core import ByRows, Choice, Probe, SizeTrial, Split, knobs, recompute
from torchtune_adaptive.recipe.search import timings
from torchtune_adaptive.recipe.search.fastest_report import FastestReport, name_of
from torchtune_adaptive.recipe.search.prober import Prober, RowsToTry
from torchtune_adaptive.recipe.search.worst_case import WorstCase
from torchtune_adaptive.recipe.settings.knob_table import (
    KNOBS_BY_KEY,
    choices,
    may_be_changed,
    rough_cost,
)

log = logging.getLogger(__name__)


Ranked = Sequence[tuple[Choice, float]]
"""Choices and the seconds that a step should take, the fastest first."""


def find_fastest(
    prober: Prober,
    rows: RowsToTry,
    known: Mapping[str, Any] | None = None,
    rank: Callable[[int, int], Ranked | None] | None = None,
) -> FastestReport:
    """Choose on the run itself, which afterwards is as it was before, except for its knobs. One trial
    confirms the choice that is ``known`` from an earlier part of this run. On rank 0, ``rank`` predicts for
    the length of rows and the capacity of a rank."""
    started, settings = time.perf_counter(), prober.settings
    allowed = possible_choices(prober)
    own = allowed[0]
    worst = prober.worst_case(rows.data, rows.lengths, settings.probe_length)
    log.info(
        f"Choosing the fastest of {counted(len(allowed), 'configuration')} that fit rows of "
        f"{worst.length} tokens ({worst.source})."
    )
    confirmed = _confirmed(known, allowed)
    with _Trials(prober, rows, worst, own, to_begin_with(allowed)) as trials:
        if confirmed is not None and trials.fits(confirmed):
            log.info("The configuration that this run had chosen still fits.")
            timed, chosen = [timings.Timing(confirmed)], confirmed
        else:
            ranked = _predicted_ranking(prober, worst.length, rank)
            predicted = dict(ranked or ())
            order = list(predicted) or sorted(allowed, key=rough_cost)
            possible = set(allowed) - {own}
            others = [one for one in order if one in possible]
            timed, chosen = _choose(trials, own, others, predicted)
    prober.step.switch(chosen)
    return FastestReport(
        asked=prober.asked,
        ranks=prober.ranks.size,
        own=own,
        chosen=chosen,
        split=trials.split(chosen),
        timed=timed,
        tried=trials.tried,
        tokens=trials.tokens,
        row_length=worst.length,
        row_source=worst.source,
        device=prober.step.memory.name,
        headroom=settings.headroom,
        seconds=time.perf_counter() - started,
        sample=rows.data.rows.sample,
    )


def _confirmed(known: Mapping[str, Any] | None, allowed: Sequence[Choice]) -> Choice | None:
    """The known choice, if it is allowed; whatever it checkpoints, as earlier versions chose other layers."""
    checkpointing = {knobs.CHECKPOINT: (known or {}).get(knobs.CHECKPOINT)}
    return next((each for one in allowed if (each := one | checkpointing) == known), None)


def _predicted_ranking(
    prober: Prober, row_length: int, rank: Callable[[int, int], Ranked | None] | None
) -> Ranked | None:
    """The same prediction on all ranks, or ranks would try different choices."""
    prober.enter("predicting the fastest configuration")
    capacity = prober.capacity()
    if rank is not None:
        log.info("Predicting how fast they are, to try the best first.")
    predicted = rank(row_length, capacity) if rank else None
    found: Ranked | None = prober.ranks.from_rank_zero(predicted)
    return found


def possible_choices(prober: Prober) -> list[Choice]:
    """What may be chosen without building another model, the config's own values first; nothing twice."""
    switches = prober.step.options.switches
    may_change = prober.settings.may_change
    own, *others = choices(
        prober.asked, prober.ranks.size, may_change, layers=switches.layers, switches_only=True
    )

    def meaning(choice: Choice) -> Choice:
        # The config's own value may have the same layers as another.
        layers = recompute.recomputed_layers(choice[knobs.CHECKPOINT], switches.layers)
        return choice | {knobs.CHECKPOINT: tuple(layers)}

    found = {meaning(own): own}
    for choice in others:
        changed = {key for key, value in choice.items() if value != own[key]}
        if all(key in switches or key == knobs.MICRO_BATCH for key in changed):
            found.setdefault(meaning(choice), choice)
    return list(found.values())


def to_begin_with(allowed: Sequence[Choice]) -> list[Choice]:
    """Choices that may need the least memory; first those that need none of the host's.

    Where there is little of that, nothing that offloads fits, and anything else may.
    """
    without = [one for one in allowed if not one.get(knobs.OFFLOADING)]
    return Choice.leanest(without) + [one for one in Choice.leanest(allowed) if one not in without]


def _choose(
    trials: _Trials, own: Choice, ranked: Sequence[Choice], predicted: Mapping[Choice, float]
) -> tuple[list[timings.Timing[Choice]], Choice]:
    """Time the first that fit, and the config's own."""
    own_fits = trials.fits(own)
    if not own_fits:
        log.info("The config's own values do not fit.")
    most = trials.prober.settings.speed_trials
    others = timings.fitting(
        ranked, trials.fits, Choice.needs_as_much_as, Choice.of_any_layers, most
    )
    ways = [own, *others] if own_fits else others
    best, found = timings.fastest(ways, trials.time, own if own_fits else None, predicted.get)
    if best is None:
        raise _nothing_fits(trials)
    return found, best.way


def _nothing_fits(trials: _Trials) -> Exception:
    may_change = trials.prober.settings.may_change
    may_split = may_be_changed(KNOBS_BY_KEY[knobs.MICRO_BATCH], may_change)
    if may_split or trials.rows.configured.micro_batch == 1:
        return trials.worst.nothing_fits(trials.last)
    return ConfigError(
        knobs.MICRO_BATCH,
        trials.rows.configured.micro_batch,
        f"does not fit, whatever exact knobs are set to: {trials.last.deciding.trouble}",
        "Set adaptive_batching.may_change=rounding, so that it may be split into smaller micro-batches",
    )


@dataclass
class _Trials:
    """Tries choices on the run: whether the longest rows fit, and how long typical steps take.

    A context, which ends with the run as it was at its beginning.
    """

    prober: Prober
    rows: RowsToTry
    worst: WorstCase
    own: Choice
    """The config's own values, which others are named after."""
    first: Sequence[Choice]
    """Choices to take the first steps with, in this order, until one fits."""
    tried: dict[Choice, SizeTrial] = field(default_factory=dict)
    tokens: int = 0
    """Tokens in a step that is timed, over all ranks and without padding."""

    def __enter__(self) -> _Trials:
        step = self.prober.step
        with ExitStack() as stack:
            # Also of the first steps, which have one row: so these need no more than what they stand for.
            self._probe: Probe = stack.enter_context(
                self.prober.probe(
                    lambda size: self.split(step.options.switches.choice).accumulation
                )
            )
            for choice in self.first:
                step.switch(choice)
                first = self._probe.prime(self.worst.batch)
                if first.fits:
                    self._open = stack.pop_all()
                    return self
            raise self.worst.nothing_fits(first)

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def split(self, choice: Choice) -> Split:
        """The batch with this choice."""
        configured = self.rows.configured
        size = choice.get(knobs.MICRO_BATCH, configured.micro_batch)
        return configured.in_micro_batches(size)

    @property
    def last(self) -> SizeTrial:
        return list(self.tried.values())[-1]

    def fits(self, choice: Choice) -> bool:
        """Whether a micro-batch of the longest rows fits; each choice is tried once."""
        if choice not in self.tried:
            self.prober.step.switch(choice)
            size = self.split(choice).micro_batch
            self.tried[choice] = self._probe.trial(size, self.worst.batch)
            log.info(f"{name_of(choice, self.own)}: {self.tried[choice].line()}")
        return self.tried[choice].fits

    def time(self, choice: Choice, steps: int) -> Sequence[float] | None:
        """Seconds of some steps of the run's first samples."""
        self.prober.step.switch(choice)
        size, ranks, data = self.split(choice).micro_batch, self.prober.ranks, self.rows.data
        if not self.tokens:
            samples = self.rows.first_samples[ranks.rank :: ranks.size]
            mine = sum(data.rows.length(data.dataset[sample]) for sample in samples)
            self.tokens = sum(ranks.gather(mine))
        batches = self.rows.first_step(ranks, ByRows("divisor"), size)
        seconds = self._probe.timed("to time it", batches, steps)
        took = f"{1e3 * median(seconds):,.0f} ms a step" if seconds else "out of memory"
        log.info(f"{name_of(choice, self.own)}: {took}, in {counted(steps, 'timed step')}")
        return seconds
