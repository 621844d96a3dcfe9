"""Choose the memory knobs that train fastest within the memory there is, by timing a few real steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.core import (
    CHECKPOINT,
    ByRows,
    Choice,
    Loader,
    Probe,
    SizeTrial,
    Split,
    Timing,
    fastest,
    fitting,
    recomputed_layers,
)
from torchtune_adaptive.recipe.search.context import SearchContext, nothing_fits, probe_of
from torchtune_adaptive.recipe.search.fastest_report import FastestReport, TimedChoice
from torchtune_adaptive.recipe.search.worst_case import WorstCase
from torchtune_adaptive.recipe.settings.knob_table import (
    KNOBS_BY_KEY,
    MICRO_BATCH,
    choices,
    may_be_changed,
    rough_cost,
)

log = logging.getLogger(__name__)


Ranked = Sequence[tuple[Choice, float]]
"""Choices and the seconds that a step should take, the fastest first."""


def find_fastest(
    run: SearchContext,
    known: Mapping[str, Any] | None = None,
    rank: Callable[[int, int], Ranked | None] | None = None,
) -> FastestReport:
    """Choose on the run itself, which afterwards is as it was before, except for its knobs.

    Args:
        run: the run.
        known: what an earlier part of this run has chosen; it is confirmed by one trial.
        rank: on rank 0, predicts for the length of rows and the capacity of a rank.
    """
    started = time.perf_counter()
    allowed = possible_choices(run)
    own = allowed[0]
    worst = run.worst_case(run.settings.probe_length)
    log.info(
        f"Choosing the fastest of {len(allowed)} configurations that fit rows of {worst.length} tokens "
        f"({worst.source})."
    )
    confirmed = next((one for one in allowed if one == known), None)
    with _Trials(run, worst, Choice.leanest(allowed)) as trials:
        if confirmed is not None and trials.fits(confirmed):
            log.info("The configuration that this run had chosen still fits.")
            timed, chosen = [Timing(confirmed)], confirmed
        else:
            ranked = _ranked(run, worst.length, rank)
            predicted = dict(ranked or ())
            order = list(predicted) or sorted(allowed, key=rough_cost)
            others = [one for one in order if one in allowed and one != own]
            timed, chosen = _choose(run, trials, own, others, predicted)
    run.step.switch(chosen)
    return FastestReport(
        cfg=run.cfg,
        ranks=run.ranks.size,
        own=own,
        chosen=chosen,
        split=_split_of(run, chosen),
        timed=[TimedChoice(each.way, each.predicted, tuple(each.steps)) for each in timed],
        tried=trials.tried,
        tokens=trials.tokens,
        row_length=worst.length,
        row_source=worst.source,
        device=run.step.memory.name,
        headroom=run.settings.headroom,
        seconds=time.perf_counter() - started,
    )


def _ranked(
    run: SearchContext, row_length: int, rank: Callable[[int, int], Ranked | None] | None
) -> Ranked | None:
    """The same prediction on all ranks, or ranks would try different choices."""
    run.watchdog.enter("predicting the fastest configuration", patience=None)
    capacity = min(run.ranks.gather(run.step.memory.capacity()))
    found: Ranked | None = run.ranks.from_rank_zero(rank(row_length, capacity) if rank else None)
    return found


def possible_choices(run: SearchContext) -> list[Choice]:
    """What may be chosen without building another model, the config's own values first; nothing twice."""
    switches, settings = run.step.options.switches, run.settings
    own, *others = choices(run.cfg, run.ranks.size, settings.may_change, switches_only=True)

    def meaning(choice: Choice) -> Choice:
        # With few layers, some values of the knob are the same.
        layers = recomputed_layers(choice[CHECKPOINT], switches.layers)
        return choice | {CHECKPOINT: tuple(layers)}

    found = {meaning(own): own}
    for choice in others:
        changed = {key for key, value in choice.items() if value != own[key]}
        if all(key in switches or key == MICRO_BATCH for key in changed):
            found.setdefault(meaning(choice), choice)
    return list(found.values())


def _choose(
    run: SearchContext,
    trials: _Trials,
    own: Choice,
    ranked: Sequence[Choice],
    predicted: Mapping[Choice, float],
) -> tuple[list[Timing[Choice]], Choice]:
    """Time the first that fit, and the config's own."""
    own_fits = trials.fits(own)
    if not own_fits:
        log.info("The config's own values do not fit.")
    others = fitting(ranked, trials.fits, Choice.needs_as_much_as, run.settings.speed_trials)
    ways = [own, *others] if own_fits else others
    best, timings = fastest(ways, trials.time, own if own_fits else None, predicted.get)
    if best is None:
        raise _nothing_fits(run, trials)
    return timings, best.way


def _nothing_fits(run: SearchContext, trials: _Trials) -> Exception:
    may_split = may_be_changed(KNOBS_BY_KEY[MICRO_BATCH], run.settings.may_change)
    if may_split or run.configured.micro_batch == 1:
        return nothing_fits(trials.last, trials.worst)
    return ConfigError(
        MICRO_BATCH,
        run.configured.micro_batch,
        f"does not fit, whatever exact knobs are set to: {trials.last.deciding.trouble}",
        "Set adaptive_batching.may_change=rounding, so that it may be split into smaller micro-batches",
    )


def _split_of(run: SearchContext, choice: Choice) -> Split:
    rows, size = run.configured.rows, choice.get(MICRO_BATCH, run.configured.micro_batch)
    return Split(size, rows // size, run.configured.ranks)


@dataclass
class _Trials:
    """Tries choices on the run: whether the longest rows fit, and how long typical steps take.

    A context, which ends with the run as it was at its beginning.
    """

    run: SearchContext
    worst: WorstCase
    leanest: Sequence[Choice]
    """What may need the least memory."""
    tried: dict[Choice, SizeTrial] = field(default_factory=dict)
    tokens: int = 0
    """In a step that is timed, over all ranks and without padding."""

    def __enter__(self) -> _Trials:
        run = self.run
        self._probe: Probe = probe_of(
            run,
            lambda size: self.worst.batch(size, run.data.collate),
            # Also of the first steps, which have one row: so these need no more than what they stand for.
            lambda size: _split_of(run, run.step.options.switches.choice).accumulation,
        )
        self._probe.__enter__()
        for choice in self.leanest:
            run.step.switch(choice)
            first = self._probe.prime()
            if first.fits:
                return self
        self._probe.__exit__()
        raise nothing_fits(first, self.worst)

    def __exit__(self, *error: Any) -> None:
        self._probe.__exit__(*error)

    @property
    def last(self) -> SizeTrial:
        return list(self.tried.values())[-1]

    def fits(self, choice: Choice) -> bool:
        """Whether a micro-batch of the longest rows fits; each choice is tried once."""
        if choice not in self.tried:
            self.run.step.switch(choice)
            self.tried[choice] = self._probe.trial(_split_of(self.run, choice).micro_batch)
        return self.tried[choice].fits

    def time(self, choice: Choice, steps: int) -> Sequence[float] | None:
        """Seconds of some steps of the run's first samples, after one that is not counted."""
        self.run.step.switch(choice)
        size = _split_of(self.run, choice).micro_batch
        loader = Loader(
            self.run.data.dataset,
            self.run.data.collate,
            self.run.order,
            self.run.ranks.rank,
            self.run.ranks.size,
            ByRows("divisor"),
        )
        step = list(loader.epoch(0).step(self.run.configured.rows, size))
        if not self.tokens:
            samples = [sample for each in step for sample in each.sample_ids]
            rows = (self.run.data.dataset[sample] for sample in samples)
            mine = sum(self.run.data.rows.length(row) for row in rows)
            self.tokens = sum(self.run.ranks.gather(mine))
        batches = _Fresh([each.batch for each in step])
        return self._probe.timed("to time it", batches, steps, warm_up=1)


class _Fresh(Sequence[dict[str, Any]]):
    """Batches that are copied when they are used: on the simulated device, those of a whole step would count
    as in use at once."""

    def __init__(self, batches: list[dict[str, Any]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in self._batches[index].items()
        }
