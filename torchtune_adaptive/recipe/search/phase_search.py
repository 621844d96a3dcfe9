"""The search for the sizes of the phases of a run that generates its rows.

All are searched in one snapshot, with all models and the optimizer's state in memory. Nothing of one phase is
on the device in another, so they are searches of their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtune_adaptive.common import Cache, NothingFits, cache_folder
from torchtune_adaptive.core import Budget, Phase, Probe, SizeTrial, Split, candidates
from torchtune_adaptive.recipe.rollout.rows import Row, collate, longest_rows
from torchtune_adaptive.recipe.search.phase_report import (
    GENERATION,
    SCORING,
    TRAINING,
    FoundBudget,
    FoundRows,
    PhaseReport,
    Sizes,
)
from torchtune_adaptive.recipe.search.prober import Prober
from torchtune_adaptive.recipe.search.size_search import SizeSearch
from torchtune_adaptive.recipe.search.token_budget import find_or_confirm, lengths_to_measure
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.fingerprint import search_facts
from torchtune_adaptive.recipe.setup.phases import Phases

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PhaseSearch:
    """Finds the sizes that the config does not say."""

    prober: Prober
    """The maker of trials."""
    phases: Phases
    given: Sizes
    """The sizes that the config says."""
    tokens: dict[str, bool | int]
    """By phase, whether it has a token budget, or which one."""

    def run(self, configured: Split, known: Sizes) -> PhaseReport:
        """The sizes of all phases.

        Args:
            configured: the batch that the config says.
            known: the sizes that an earlier part of this run has found.
        """
        started, prober, settings = time.perf_counter(), self.prober, self.prober.settings
        sizes, longest = self.phases.sizes, self.phases.longest
        rows = sizes.step_rows
        row = f"{longest} + {sizes.max_new} tokens, the longest prompt and response"
        log.info(f"Searching for the most rows of {row}.")
        found: dict[str, FoundRows | FoundBudget] = {}
        # With a budget, a step has as many micro-batches as it takes.
        accumulation = (lambda size: 2) if self.tokens[TRAINING] else lambda size: -(-rows // size)
        with prober.probe(accumulation) as probe:
            first = probe.prime(self._batch)
            _require(first, TRAINING)
            if TRAINING not in self.given:
                found[TRAINING] = self._find(
                    TRAINING,
                    first,
                    lambda size, length: probe.trial(size, lambda n: self._batch(n, length)),
                    known,
                )
            for name, phase in (
                (GENERATION, self.phases.generation),
                (SCORING, self.phases.scoring),
            ):
                if name not in self.given:
                    found[name] = self._find_phase(probe, name, phase, known)
        decided = self.given | {name: each.size for name, each in found.items()}
        micro_batch = decided[TRAINING]
        if isinstance(micro_batch, int):
            configured = Split(micro_batch, -(-rows // micro_batch), prober.ranks.size, rows)
        return PhaseReport(
            found=found,
            sizes={name: decided[name] for name in (TRAINING, GENERATION, SCORING)},
            split=configured,
            row=row,
            device=prober.step.memory.name,
            headroom=settings.headroom,
            seconds=time.perf_counter() - started,
        )

    def _find_phase(
        self, probe: Probe, name: str, phase: Phase[Any, Any], known: Sizes
    ) -> FoundRows | FoundBudget:
        def trial(size: int, length: int) -> SizeTrial:
            return probe.trial_of(phase, size, self._rows(size, length))

        self.phases.generator.width = self.phases.longest
        first = trial(1, self.phases.longest_row)
        _require(first, name)
        return self._find(name, first, trial, known, {1: first})

    def _find(
        self,
        name: str,
        first: SizeTrial,
        trial: Callable[[int, int], SizeTrial],
        known: Sizes,
        tried: dict[int, SizeTrial] | None = None,
    ) -> FoundRows | FoundBudget:
        """Search for a size.

        Args:
            name: the name of the phase.
            first: the trial of one row.
            trial: a function that tries a number of rows, of a length.
            known: the sizes of an earlier part of this run.
            tried: the trials that the search need not repeat.
        """
        prober, settings, sizes = self.prober, self.prober.settings, self.phases.sizes
        ceiling = rows = sizes.step_rows if name == TRAINING else sizes.rows
        if name == TRAINING and settings.ceiling is not None:
            ceiling = min(rows, settings.ceiling)
        about = {"phase": name, "prompt": self.phases.longest}
        if self.tokens[name]:
            return self._find_budget(name, trial, ceiling, about, known.get(name))
        log.info(f"Searching for the micro-batch of {name}.")
        possible = candidates(settings.rounding, ceiling, rows)
        assert settings.search != "predict", "it is refused"
        search = SizeSearch(
            lambda size: trial(size, self.phases.longest_row),
            first,
            possible,
            settings.search,
            prober.ranks,
            SizeSearch.remembered(settings.cache),
            tried=tried or {},
        )
        size = known.get(name)
        found = search.result(
            self._facts(**about, largest_candidate=possible[-1]),
            size if isinstance(size, int) else None,
        )
        if found.size is None:
            _require(found.trials[-1], name)
        return FoundRows(found)

    def _find_budget(
        self,
        name: str,
        trial: Callable[[int, int], SizeTrial],
        most_rows: int,
        about: dict[str, Any],
        known: int | Budget | None,
    ) -> FoundBudget:
        """Search for a token budget; see ``token_budget.find_budget``."""
        prober, cache = self.prober, _remembered(self.prober.settings.cache)
        log.info(f"Searching for the token budget of {name}.")
        lengths = lengths_to_measure([self.phases.longest], self.phases.longest_row)
        facts = self._facts(**about, lengths=lengths, most_rows=most_rows)
        if not isinstance(known, Budget):
            # From rank 0, or ranks with different caches would diverge.
            cached = prober.ranks.from_rank_zero(cache.get(facts))
            known = budget_of(cached) if cached else None
        budget, trials = find_or_confirm(trial, lengths, most_rows, known)
        if budget is None:
            raise _nothing_fits(trials[-1].trial, name)
        if prober.ranks.is_zero:
            cache.put(facts, [list(each) for each in budget.measured])
        return FoundBudget(budget, trials)

    def _facts(self, **trials: Any) -> dict[str, Any]:
        prober = self.prober
        return search_facts(
            prober.cfg,
            prober.settings,
            **trials,
            ranks=prober.ranks.size,
            device=prober.step.memory.name,
            capacity=prober.capacity(),
        )

    def _rows(self, size: int, length: int) -> list[Row]:
        """Rows for a trial; where they are shorter than the longest, so is the response."""
        phases = self.phases
        prompt = min(phases.longest, length - 1)
        return longest_rows(size, prompt, length - prompt, phases.values)

    def _batch(self, size: int, length: int | None = None) -> dict[str, Any]:
        rows = self._rows(size, length or self.phases.longest_row)
        return collate(rows, self.phases.padding_id)


def _remembered(setting: bool | str) -> Cache[list[list[int]]]:
    """The token budgets that searches found, beside the sizes in rows."""
    return Cache(cache_folder(setting, "batch_sizes"), "token budget", _is_budget)


def _is_budget(value: Any) -> bool:
    try:
        budget_of(value)
    except (TypeError, ValueError):
        return False
    return True


def _require(trial: SizeTrial, phase: str) -> None:
    """Raise where not even one row fits."""
    if not trial.fits:
        raise _nothing_fits(trial, phase)


def _nothing_fits(trial: SizeTrial, phase: str) -> NothingFits:
    return trial.nothing_fits(
        f"row in {phase}",
        "Lower max_generated_tokens, leave out long prompts, turn on enable_activation_checkpointing, use "
        f"more ranks, or allow more memory ({BLOCK}.memory_limit, {BLOCK}.headroom).",
    )


def budget_of(measured: list[list[int]]) -> Budget:
    """A budget, as it is saved."""
    return Budget(tuple((length, rows) for length, rows in measured))
