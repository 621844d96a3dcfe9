"""The sizes of a run that generates its rows: of generating, scoring and training.

Rows that are scored and trained on differ in length, so their micro-batches may have a token budget in the
place of a number of rows. All sizes are searched in one snapshot, with all models and the optimizer's state
in memory. Nothing of one part is on the device in another, so they are searches of their own.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchtune_adaptive.common import ConfigError, NothingFits
from torchtune_adaptive.core import (
    Budget,
    ByRows,
    ByTokens,
    MicroBatches,
    Phase,
    Probe,
    SizeTrial,
    Split,
    candidates,
)
from torchtune_adaptive.recipe.checkpoints.training_state import TrainingState
from torchtune_adaptive.recipe.rollout.phases import Phases
from torchtune_adaptive.recipe.rollout.rows import Row, collate, longest_rows
from torchtune_adaptive.recipe.search.decide import DecidedBatch, announce
from torchtune_adaptive.recipe.search.in_tokens import FoundBudget, InTokens, lengths_to_measure
from torchtune_adaptive.recipe.search.prober import Prober
from torchtune_adaptive.recipe.search.rollout_report import (
    IN_TOKENS,
    RolloutSizesReport,
    Sizes,
    in_words,
)
from torchtune_adaptive.recipe.search.sizing import FoundRows, InRows
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.phase_names import PHASES, SCORING, TRAINING

log = logging.getLogger(__name__)


def decide_sizes(
    prober: Prober, phases: Phases, start: Split, saved: TrainingState | None
) -> DecidedBatch:
    """Find the sizes of all parts, or take those that the config says; phases have theirs afterward. In a
    resumed run, the sizes of the ``saved`` training state are confirmed.

    Raises:
        ConfigError: a token budget has less than the longest row.
    """
    settings, rows = prober.settings, phases.sizes.rows
    to_size = _parts(prober, phases, start, saved)
    sizes: Sizes = {each.name: each.given for each in to_size if each.given is not None}
    report, largest = None, None
    if len(sizes) < len(to_size):
        report = _find(prober, phases, to_size, start)
        start, sizes = report.split, report.sizes
        announce(prober.asked, prober.ranks, report)
        if TRAINING in report.found and isinstance(sizes[TRAINING], int):
            largest = start.micro_batch
    else:
        said = ", ".join(f"{name} in {in_words(sizes[name])}" for name in PHASES)
        log.info(f"Rollouts of {rows} rows per rank, in micro-batches: {said}.")
    after = settings.grow_back_after if settings.shrinks else None
    for runner in (phases.generation, phases.scoring):
        if isinstance(size := sizes[runner.name], Budget):
            runner.begin(size.tokens, after, size.halves[1:])
        else:
            runner.begin(min(size, rows), after)

    def divided(size: int | Budget) -> MicroBatches:
        if isinstance(size, Budget):
            ignored = prober.step.objective.ignored
            return ByTokens.of_own_rows(size, phases.generator.padding_id, ignored)
        return ByRows(settings.rounding)

    training, scoring = divided(sizes[TRAINING]), divided(sizes[SCORING])
    return DecidedBatch(start, training, largest, report, scoring)


def _parts(
    prober: Prober, phases: Phases, start: Split, saved: TrainingState | None
) -> list[_Part]:
    """The parts of a rollout in the order in which they are searched."""
    settings, sizes = prober.settings, phases.sizes
    scoring: bool | int | None = settings.scoring_token_budget
    if scoring is None:
        scoring = settings.budgets and settings.scoring_batch_size is None
    prompts = prober.asked["forward_batch_size"] or sizes.prompts
    forward = min(prompts * sizes.samples, sizes.rows)
    rows = settings.generation_batch_size, settings.scoring_batch_size
    if not settings.use_maximum_batch_size:
        rows = rows[0] or forward, rows[1] or forward
    trained = None if settings.use_maximum_batch_size else start.micro_batch
    to_size = partial(_Part, prober, phases, saved)
    return [
        to_size(None, trained, settings.token_budget),
        to_size(phases.generation, rows[0], False),
        to_size(phases.scoring, rows[1], scoring),
    ]


@dataclass(frozen=True)
class _Part:
    """A part of a rollout, which is generation, scoring or training, and its size."""

    prober: Prober
    phases: Phases
    saved: TrainingState | None
    """The training state of the checkpoint that is resumed."""
    runner: Phase[Any, Any] | None
    """What runs it; None for training."""
    rows: int | None
    """Its rows, if they are not to be searched."""
    tokens: bool | int
    """Whether it has a token budget, or which one."""

    @property
    def name(self) -> str:
        return TRAINING if self.runner is None else self.runner.name

    @property
    def in_tokens(self) -> bool:
        return self.tokens is not False

    @property
    def given(self) -> int | Budget | None:
        """The size that the config says; None where it is to be searched."""
        if not self.in_tokens:
            return self.rows
        if self.tokens is True:
            return None
        phases, longest = self.phases, self.phases.longest_row
        if self.tokens < longest:
            raise ConfigError(
                IN_TOKENS[self.name],
                self.tokens,
                f"is less than the longest row may have: {phases.longest} tokens of a prompt and "
                f"{phases.sizes.max_new} of the response",
                f"Set it to {longest} or more, or lower max_generated_tokens",
            )
        return Budget.of_tokens(self.tokens, longest)

    @property
    def _known(self) -> Any:
        """The size that an earlier part of this run has found."""
        saved = self.saved
        if saved is None or saved.rollouts is None:
            return None
        if saved.growth.largest is None and saved.token_budget is None:
            return None
        budgets = {TRAINING: saved.token_budget, SCORING: saved.rollouts.get("scoring_budget")}
        budget = budgets.get(self.name)
        if self.in_tokens or budget:
            return budget if self.in_tokens else None
        return saved.rollouts["found"].get(self.name, saved.growth.largest)

    def batch(self, size: int, length: int | None = None) -> dict[str, Any]:
        """A micro-batch of training; of the longest rows, unless another length is given."""
        rows = self._rows(size, length or self.phases.longest_row)
        return collate(rows, self.phases.generator.padding_id)

    def _rows(self, size: int, length: int) -> list[Row]:
        """Rows for a trial; where they are shorter than the longest, so is the response."""
        prompt = min(self.phases.longest, length - 1)
        return longest_rows(size, prompt, length - prompt, self.phases.values)

    def _trial(self, probe: Probe, size: int, length: int) -> SizeTrial:
        if self.runner is None:
            return probe.trial(size, lambda rows: self.batch(rows, length))
        return probe.trial_of(self.runner, size, self._rows(size, length))

    def find(self, probe: Probe, first: SizeTrial) -> FoundRows | FoundBudget:
        """The size, after the first steps of training."""
        prober, settings, phases = self.prober, self.prober.settings, self.phases
        trial, longest = partial(self._trial, probe), phases.longest_row
        step, most = phases.sizes.rows, phases.sizes.rows
        if self.runner is None:
            step = phases.sizes.step_rows
            most = min(step, settings.ceiling or step)
        facts = partial(prober.facts, phase=self.name, prompt=phases.longest)
        if self.in_tokens:
            log.info(f"Searching for the token budget of {self.name}.")
            lengths = lengths_to_measure([phases.longest], longest)
            return InTokens(
                trial=trial,
                lengths=lengths,
                most_rows=most,
                nothing_fits=self.nothing_fits,
                about=facts(lengths=lengths, most_rows=most),
                known=self._known,
            ).find(prober.ranks, settings.cache)
        tried: dict[int, SizeTrial] = {}
        if self.runner is not None:
            tried[1] = first = trial(1, longest)
            if not first.fits:
                raise self.nothing_fits(first)
        log.info(f"Searching for the micro-batch of {self.name}.")
        possible = candidates(settings.rounding, most, step)
        return InRows(
            trial=lambda size: trial(size, longest),
            sizes=possible,
            strategy=settings.search,
            nothing_fits=self.nothing_fits,
            about=facts(largest_candidate=possible[-1]),
            known=self._known,
            first=first,
            tried=tried,
        ).find(prober.ranks, settings.cache)

    def nothing_fits(self, trial: SizeTrial) -> NothingFits:
        return trial.nothing_fits(
            f"row in {self.name}",
            "Lower max_generated_tokens, leave out long prompts, turn on enable_activation_checkpointing, "
            f"use more ranks, or allow more memory ({BLOCK}.memory_limit, {BLOCK}.headroom).",
        )


def _find(
    prober: Prober, phases: Phases, to_size: list[_Part], configured: Split
) -> RolloutSizesReport:
    """Find the sizes that the config does not say."""
    started, rows, training = time.perf_counter(), phases.sizes.step_rows, to_size[0]
    row = f"{phases.longest} + {phases.sizes.max_new} tokens, the longest prompt and response"
    log.info(f"Searching for the most rows of {row}.")
    phases.generator.width = phases.longest
    # With a budget, a step has as many micro-batches as it takes.
    accumulation = (lambda size: 2) if training.in_tokens else (lambda size: -(-rows // size))
    found: dict[str, FoundRows | FoundBudget] = {}
    sizes: Sizes = {}
    with prober.primed(accumulation, training.batch, training.nothing_fits) as (probe, first):
        for each in to_size:
            if (size := each.given) is None:
                found[each.name] = each.find(probe, first)
                size = found[each.name].size
            assert size is not None, "it raises where nothing fits"
            sizes[each.name] = size
    if isinstance(micro_batch := sizes[TRAINING], int):
        configured = configured.in_micro_batches(micro_batch)
    return RolloutSizesReport(
        found=found,
        sizes=sizes,
        split=configured,
        row=row,
        device=prober.step.memory.name,
        headroom=prober.settings.headroom,
        seconds=time.perf_counter() - started,
    )
