"""The batch that a run trains with: as configured, found by a search, or resumed from a checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtune_adaptive.common import ConfigError, not_essential
from torchtune_adaptive.core import (
    Budget,
    ByRows,
    MicroBatches,
    Rounding,
    SizeTrial,
    Split,
    resumed_start,
)
from torchtune_adaptive.recipe.data.images import images_of
from torchtune_adaptive.recipe.plan.background import BackgroundPlanner
from torchtune_adaptive.recipe.search.batch_size import find_batch_size
from torchtune_adaptive.recipe.search.budget_report import BudgetReport
from torchtune_adaptive.recipe.search.context import SearchContext
from torchtune_adaptive.recipe.search.fastest_report import FastestReport
from torchtune_adaptive.recipe.search.fastest_search import find_fastest
from torchtune_adaptive.recipe.search.size_report import SearchReport
from torchtune_adaptive.recipe.search.token_budget import find_token_budget
from torchtune_adaptive.recipe.settings.checks import token_budget_with_images

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """What was decided about the batch of a run before its first step."""

    start: Split
    """The batch that training starts with; in a resumed run, that it once started with."""
    largest: int | None
    """The largest micro-batch that fits, as a search found it."""
    micro_batches: MicroBatches
    validation: int | None = None
    """The rows in a micro-batch of validation, where a search has tried it."""
    report: SearchReport | BudgetReport | None = None
    """Of the search, if there was one."""


def decide_batch(
    run: SearchContext, saved: dict[str, Any] | None, planner: BackgroundPlanner | None
) -> Batch:
    """Search where a search is asked for, and settle what training starts with.

    Args:
        run: the run to search on.
        saved: the training state of the checkpoint that is resumed.
        planner: on rank 0, predicts the size that should be found.
    """
    # A resumed run is bound by what it decided before; one that decided nothing is not.
    known = saved["growth"]["largest"] if saved and run.settings.adapts else None
    batch = _searched(run, saved, known, planner)
    if saved and known is not None:
        start = resumed_start(saved["growth"], batch.largest or known, run.configured.ranks)
        batch = replace(batch, start=start)
    return batch


def _searched(
    run: SearchContext,
    saved: dict[str, Any] | None,
    known: int | None,
    planner: BackgroundPlanner | None,
) -> Batch:
    settings, configured = run.settings, run.configured
    rounding: Rounding = "divisor" if settings.keep_global_batch else settings.rounding
    by_rows = ByRows(rounding)
    if settings.budgets:
        if run.data.packed:
            log.info("token_budget has no effect: packed rows are all full.")
            return Batch(configured, None, by_rows)
        budget = _by_tokens(run, saved)
        if budget is None or not budget.used:
            size = _size_of(budget.validation) if budget else None
            return Batch(configured, None, ByRows(rounding, instead_of_budget=True), size, budget)
        # Tokens are bounded, not rows.
        size = _size_of(budget.validation)
        return Batch(configured, run.order.rows_per_rank, budget.micro_batches, size, budget)
    if settings.use_fastest_configuration:
        return _fastest(run, saved, planner)
    if not settings.searches:
        return Batch(configured, None, by_rows)
    report = find_batch_size(run, known, planner)
    _announce(run, report)
    if not settings.use_maximum_batch_size and configured.micro_batch > report.largest:
        raise ConfigError(
            "batch_size",
            configured.micro_batch,
            f"does not fit: {report.reason()}",
            f"Use {report.largest}",
        )
    return Batch(report.after, report.largest, by_rows, _size_of(report.validation), report)


def _size_of(trial: SizeTrial | None) -> int | None:
    return trial.size if trial else None


def _fastest(
    run: SearchContext, saved: dict[str, Any] | None, planner: BackgroundPlanner | None
) -> Batch:
    known = saved.get("knobs") if saved else None
    report = find_fastest(run, known, planner.ranked if planner else None)
    compared = [each for each in report.timed if each.predicted and each.measured]
    if planner is not None and compared and not run.compiled:
        planner.learn_seconds(compared[0].measured, compared[0].predicted)  # type: ignore[arg-type]
    _announce(run, report)
    return Batch(report.split, None, ByRows("divisor"))


def _by_tokens(run: SearchContext, saved: dict[str, Any] | None) -> BudgetReport | None:
    """A token budget, found or confirmed; None if it was slower when the run began."""
    known = saved["token_budget"] if saved else None
    if known == [] and run.settings.token_budget is True:
        log.info("No token budget: it was slower when this run began (the checkpoint says).")
        return None
    run.watchdog.enter("looking up the lengths of all rows", patience=None)
    if run.order.rows_per_rank and images_of(run.data.dataset[0]):
        raise token_budget_with_images(run.settings)
    lengths = run.row_lengths.all(say_progress=run.ranks.rank == 0)
    budget = Budget(tuple((length, rows) for length, rows in known)) if known else None
    report = find_token_budget(run, lengths, budget)
    _announce(run, report)
    return report


def _announce(run: SearchContext, report: SearchReport | BudgetReport | FastestReport) -> None:
    """Log what was found, and write it to files; on rank 0."""
    if run.ranks.rank != 0:
        return
    log.info(report.text())
    with not_essential("The report of the search"):
        files = report.write(Path(run.cfg.output_dir))
        log.info(f"Details: {', '.join(map(str, files))}")
    if isinstance(report, FastestReport) or (
        isinstance(report, SearchReport) and report.uses_what_was_found
    ):
        log.info(f"To skip the search next time: {report.overrides()}")
