"""The batch that a run trains with: as configured, found by a search, or resumed from a checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune_adaptive.batching.packing import Budget
from torchtune_adaptive.batching.split import Split, resumed_start
from torchtune_adaptive.data.micro_batches import ByRows, ByTokens, MicroBatches
from torchtune_adaptive.data.row_lengths import row_lengths
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.plan.background import BackgroundPlanner
from torchtune_adaptive.search.batch_size import find_batch_size
from torchtune_adaptive.search.budget_report import BudgetReport
from torchtune_adaptive.search.context import SearchContext
from torchtune_adaptive.search.report import SearchReport
from torchtune_adaptive.search.token_budget import find_token_budget
from torchtune_adaptive.text import not_essential

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """What was decided about the batch of a run before its first step."""

    start: Split
    """The batch that training starts with; in a resumed run, that it once started with."""
    largest: int | None
    """The largest micro-batch that fits, as a search found it."""
    micro_batches: MicroBatches


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
        batch = Batch(start, batch.largest, batch.micro_batches)
    return batch


def _searched(
    run: SearchContext,
    saved: dict[str, Any] | None,
    known: int | None,
    planner: BackgroundPlanner | None,
) -> Batch:
    settings, configured = run.settings, run.configured
    by_rows = ByRows("divisor" if settings.keep_global_batch else settings.rounding)
    if settings.budgets:
        if run.data.packed:
            log.info("token_budget has no effect: packed rows are all full.")
            return Batch(configured, None, by_rows)
        # Tokens are bounded, not rows.
        return Batch(configured, run.order.rows_per_rank, _by_tokens(run, saved))
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
    return Batch(report.after, report.largest, by_rows)


def _by_tokens(run: SearchContext, saved: dict[str, Any] | None) -> ByTokens:
    run.watchdog.enter("looking up the lengths of all rows", patience=None)
    is_rank_zero = run.ranks.rank == 0
    cache = run.settings.cache
    lengths = row_lengths(run.data.dataset, run.cfg, run.ranks, cache, is_rank_zero)
    known = saved["token_budget"] if saved else None
    budget = Budget(tuple((length, rows) for length, rows in known)) if known else None
    report = find_token_budget(run, lengths, budget)
    _announce(run, report)
    return report.micro_batches


def _announce(run: SearchContext, report: SearchReport | BudgetReport) -> None:
    """Log what was found, and write it to files; on rank 0."""
    if run.ranks.rank != 0:
        return
    log.info(report.text())
    with not_essential("The report of the search"):
        files = report.write(Path(run.cfg.output_dir))
        log.info(f"Details: {', '.join(map(str, files))}")
    if isinstance(report, SearchReport) and report.uses_what_was_found:
        log.info(f"To skip the search next time: {report.overrides()}")
