"""The sizes of a run that generates its rows: of generating, scoring and training.

Rows that are scored and trained on differ in length, so their micro-batches may have a token budget in the
place of a number of rows.
"""

from __future__ import annotations

import logging

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.core import Budget, ByRows, ByTokens, MicroBatches
from torchtune_adaptive.recipe.checkpoints.training_state import TrainingState
from torchtune_adaptive.recipe.rollout.phases import Phases
from torchtune_adaptive.recipe.search.decide import DecidedBatch, announce
from torchtune_adaptive.recipe.search.phase_report import IN_TOKENS, Sizes, in_words
from torchtune_adaptive.recipe.search.phase_search import PhaseSearch
from torchtune_adaptive.recipe.search.prober import Prober
from torchtune_adaptive.recipe.search.remembered_budget import budget_of
from torchtune_adaptive.recipe.settings.adaptive import AdaptiveSettings
from torchtune_adaptive.recipe.settings.knob_table import configured_batch
from torchtune_adaptive.recipe.settings.phase_names import GENERATION, PHASES, SCORING, TRAINING

log = logging.getLogger(__name__)


def decide_sizes(prober: Prober, phases: Phases, saved: TrainingState | None) -> DecidedBatch:
    """Find the sizes of all phases, or take those that the config says; phases have theirs afterward.

    Args:
        prober: the maker of trials.
        phases: generation and scoring.
        saved: the training state of the checkpoint that is resumed, whose sizes are confirmed.

    Raises:
        ConfigError: a token budget has less than the longest row.
    """
    settings, rows = prober.settings, phases.sizes.rows
    start = configured_batch(prober.cfg, prober.ranks.size)
    prompts = prober.cfg.get("forward_batch_size") or phases.sizes.prompts
    forward = min(prompts * phases.sizes.samples, rows)
    tokens = _tokens(settings)
    sizes = _given(
        settings,
        tokens,
        {GENERATION: forward, SCORING: forward, TRAINING: start.micro_batch},
        phases,
    )
    report, largest = None, None
    if {*PHASES} - {*sizes}:
        report = PhaseSearch(prober, phases, sizes, tokens).run(start, _known(saved))
        start, sizes = report.split, {**report.sizes}
        announce(prober.cfg, prober.ranks, report)
        largest = start.micro_batch if TRAINING in report.found and not tokens[TRAINING] else None
    divided: dict[str, MicroBatches] = {
        name: ByTokens(size, (), phases.padding_id, prober.step.objective.ignored)
        if isinstance(size, Budget)
        else ByRows(settings.rounding)
        for name, size in sizes.items()
    }
    after = settings.grow_back_after if settings.shrinks else None
    for name, phase in ((GENERATION, phases.generation), (SCORING, phases.scoring)):
        if isinstance(size := sizes[name], Budget):
            phase.begin(size.tokens, after, size.halves[1:])
        else:
            phase.begin(min(size, rows), after)
    if report is None:
        said = ", ".join(f"{name} in {in_words(sizes[name])}" for name in PHASES)
        log.info(f"Rollouts of {rows} rows per rank, in micro-batches: {said}.")
    return DecidedBatch(start, largest, divided[TRAINING], report=report, scoring=divided[SCORING])


def _tokens(settings: AdaptiveSettings) -> dict[str, bool | int]:
    """By phase, whether it has a token budget, or which one."""
    scoring: bool | int | None = settings.scoring_token_budget
    if scoring is None:
        scoring = settings.budgets and settings.scoring_batch_size is None
    return {TRAINING: settings.token_budget, SCORING: scoring, GENERATION: False}


def _given(
    settings: AdaptiveSettings,
    tokens: dict[str, bool | int],
    otherwise: dict[str, int],
    phases: Phases,
) -> Sizes:
    """The sizes that the config says; those of other phases are to be searched."""
    rows = {GENERATION: settings.generation_batch_size, SCORING: settings.scoring_batch_size}
    given: Sizes = {}
    for name in (TRAINING, GENERATION, SCORING):
        number = tokens[name]
        if number is True:
            continue
        if number is not False:
            given[name] = _budget(IN_TOKENS[name], number, phases)
        elif (size := rows.get(name)) is not None:
            given[name] = size
        elif not settings.use_maximum_batch_size:
            given[name] = otherwise[name]
    return given


def _budget(key: str, tokens: int, phases: Phases) -> Budget:
    longest = phases.longest_row
    if tokens < longest:
        raise ConfigError(
            key,
            tokens,
            f"is less than the longest row may have: {phases.longest} tokens of a prompt and "
            f"{phases.sizes.max_new} of the response",
            f"Set it to {longest} or more, or lower max_generated_tokens",
        )
    return Budget.of_tokens(tokens, longest)


def _known(saved: TrainingState | None) -> Sizes:
    """The sizes that an earlier part of this run has found."""
    if saved is None or saved.rollouts is None:
        return {}
    largest = saved.growth.largest
    if largest is None and saved.token_budget is None:
        return {}
    known: Sizes = {**saved.rollouts["found"], **({TRAINING: largest} if largest else {})}
    budgets = {TRAINING: saved.token_budget, SCORING: saved.rollouts.get("scoring_budget")}
    return known | {name: budget_of(value) for name, value in budgets.items() if value}
