"""The search for the sizes of the phases of a run that generates its rows.

All are searched in one snapshot, with all models and the optimizer's state in memory. Nothing of one phase is
on the device in another, so they are searches of their own.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchtune_adaptive.common import NothingFits
from torchtune_adaptive.core import Budget, Phase, Probe, SizeTrial, Split, candidates
from torchtune_adaptive.recipe.rollout.phases import Phases
from torchtune_adaptive.recipe.rollout.rows import Row, collate, longest_rows
from torchtune_adaptive.recipe.search.phase_report import FoundBudget, FoundRows, PhaseReport, Sizes
from torchtune_adaptive.recipe.search.prober import Prober
from torchtune_adaptive.recipe.search.remembered_budget import RememberedBudget
from torchtune_adaptive.recipe.search.size_search import SizeSearch
from torchtune_adaptive.recipe.search.token_budget import (
    TrialAt,
    find_or_confirm,
    lengths_to_measure,
)
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.fingerprint import search_facts
from torchtune_adaptive.recipe.settings.phase_names import GENERATION, SCORING, TRAINING

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
        started, prober, phases = time.perf_counter(), self.prober, self.phases
        rows = phases.sizes.step_rows
        row = f"{phases.longest} + {phases.sizes.max_new} tokens, the longest prompt and response"
        log.info(f"Searching for the most rows of {row}.")
        phases.generator.width = phases.longest
        found: dict[str, FoundRows | FoundBudget] = {}
        # With a budget, a step has as many micro-batches as it takes.
        accumulation = (lambda size: 2) if self.tokens[TRAINING] else lambda size: -(-rows // size)
        with prober.probe(accumulation) as probe:
            primed = probe.prime(self._batch)
            _require(primed, TRAINING)
            trials: dict[str, TrialAt] = {
                TRAINING: lambda size, length: probe.trial(size, lambda n: self._batch(n, length)),
                GENERATION: partial(self._trial_of, probe, phases.generation),
                SCORING: partial(self._trial_of, probe, phases.scoring),
            }
            for name, trial in trials.items():
                if name in self.given:
                    continue
                find = self._budget if self.tokens[name] else self._rows_that_fit
                found[name] = find(name, trial, known.get(name), primed)
        decided = {name: found[name].size if name in found else self.given[name] for name in trials}
        if isinstance(micro_batch := decided[TRAINING], int):
            configured = Split(micro_batch, -(-rows // micro_batch), prober.ranks.size, rows)
        return PhaseReport(
            found=found,
            sizes=decided,
            split=configured,
            row=row,
            device=prober.step.memory.name,
            headroom=prober.settings.headroom,
            seconds=time.perf_counter() - started,
        )

    def _trial_of(self, probe: Probe, phase: Phase[Any, Any], size: int, length: int) -> SizeTrial:
        return probe.trial_of(phase, size, self._rows(size, length))

    def _most_rows(self, name: str) -> tuple[int, int]:
        """The most rows that a micro-batch may have, and those that are to be divided."""
        sizes, ceiling = self.phases.sizes, self.prober.settings.ceiling
        if name != TRAINING:
            return sizes.rows, sizes.rows
        return min(sizes.step_rows, ceiling or sizes.step_rows), sizes.step_rows

    def _rows_that_fit(
        self, name: str, trial: TrialAt, known: int | Budget | None, primed: SizeTrial
    ) -> FoundRows:
        """Search for a number of rows, whatever their length."""
        prober, settings, longest = self.prober, self.prober.settings, self.phases.longest_row
        tried = {} if name == TRAINING else {1: trial(1, longest)}
        first = tried.get(1, primed)
        _require(first, name)
        log.info(f"Searching for the micro-batch of {name}.")
        assert settings.search != "predict", "it is refused"
        possible = candidates(settings.rounding, *self._most_rows(name))
        search = SizeSearch(
            lambda size: trial(size, longest),
            first,
            possible,
            settings.search,
            prober.ranks,
            SizeSearch.remembered(settings.cache),
            tried=tried,
        )
        facts = self._facts(name, largest_candidate=possible[-1])
        found = search.result(facts, known if isinstance(known, int) else None)
        if found.size is None:
            _require(found.trials[-1], name)
        return FoundRows(found)

    def _budget(
        self, name: str, trial: TrialAt, known: int | Budget | None, primed: SizeTrial
    ) -> FoundBudget:
        """Search for a token budget; see ``token_budget.find_budget``."""
        log.info(f"Searching for the token budget of {name}.")
        most_rows, _ = self._most_rows(name)
        lengths = lengths_to_measure([self.phases.longest], self.phases.longest_row)
        facts = self._facts(name, lengths=lengths, most_rows=most_rows)
        prober, saved = self.prober, known if isinstance(known, Budget) else None
        remembered = RememberedBudget.of(prober.settings.cache, prober.ranks, facts)
        budget, trials = find_or_confirm(trial, lengths, most_rows, saved, remembered)
        if budget is None:
            raise _nothing_fits(trials[-1].trial, name)
        return FoundBudget(budget, trials)

    def _facts(self, name: str, **trials: Any) -> dict[str, Any]:
        prober = self.prober
        return search_facts(
            prober.cfg,
            prober.settings,
            phase=name,
            prompt=self.phases.longest,
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
