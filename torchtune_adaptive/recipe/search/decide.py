"""The batch that a run trains with: as configured, found by a search, or resumed from a checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchtune_adaptive.common import ConfigError, not_essential
from torchtune_adaptive.core import ByRows, MicroBatches, Ranks, Split
from torchtune_adaptive.recipe.checkpoints.training_state import GrowthState, TrainingState
from torchtune_adaptive.recipe.data.rows import images_of
from torchtune_adaptive.recipe.plan.background import BackgroundPlanner, PeakPlanner, RankPlanner
from torchtune_adaptive.recipe.search.batch_size import find_micro_batch
from torchtune_adaptive.recipe.search.fastest_search import find_fastest
from torchtune_adaptive.recipe.search.prober import Prober, RowsToTry
from torchtune_adaptive.recipe.search.report import Report, write
from torchtune_adaptive.recipe.search.token_budget import find_token_budget
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.checks import token_budget_with_images

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecidedBatch:
    """What was decided about the batch of a run before its first step."""

    start: Split
    """The batch that training starts with; in a resumed run, that it once started with."""
    micro_batches: MicroBatches
    largest: int | None = None
    """The largest micro-batch that fits, as a search found it."""
    report: Report | None = None
    """The report of the search, if there was one."""
    scoring: MicroBatches = field(default_factory=lambda: ByRows("none"))
    """The division of generated rows for scoring."""

    @property
    def validation(self) -> int | None:
        """The rows in a micro-batch of validation, where a search has tried it."""
        tried = self.report.validation if self.report else None
        return tried.size if tried else None


def decide_batch(
    prober: Prober,
    rows: RowsToTry,
    saved: TrainingState | None,
    planner: BackgroundPlanner | None,
    as_before: bool = False,
) -> DecidedBatch:
    """Search where a search is asked for, and settle what training starts with.

    Args:
        prober: what makes trials.
        rows: the rows to try.
        saved: the training state of the checkpoint that is resumed.
        planner: on rank 0, predicts what should be found.
        as_before: whether ranks, device and config are those of the checkpoint.
    """
    settings, configured = prober.settings, rows.configured
    # A resumed run is bound by what it decided before; one that decided nothing is not.
    growth = saved.growth if saved and settings.adapts else None
    growth = growth if growth and growth.largest is not None else None
    if settings.budgets:
        batch = _in_tokens(prober, rows, saved)
    elif settings.use_fastest_configuration:
        batch = _fastest(prober, rows, saved, planner if isinstance(planner, RankPlanner) else None)
    elif growth is not None and as_before and settings.searches and settings.shrinks:
        batch = _as_it_was(prober, rows, growth)
    elif settings.searches:
        batch = _in_rows(
            prober, rows, growth, planner if isinstance(planner, PeakPlanner) else None
        )
    else:
        batch = DecidedBatch(configured, _by_rows(prober))
    if growth is None or growth.largest is None:
        return batch
    start = growth.start_on(configured.ranks, batch.largest or growth.largest)
    return replace(batch, start=start)


def _by_rows(prober: Prober, instead_of_budget: bool = False) -> ByRows:
    settings = prober.settings
    rounding = "divisor" if settings.keep_global_batch else settings.rounding
    return ByRows(rounding, instead_of_budget)


def _in_rows(
    prober: Prober, rows: RowsToTry, growth: GrowthState | None, planner: PeakPlanner | None
) -> DecidedBatch:
    """The largest micro-batch; of a resumed run, the one that its ``growth`` has known."""
    configured = rows.configured
    report = find_micro_batch(prober, rows, growth.largest if growth else None, planner)
    if growth is not None:
        split = growth.now_on(configured.ranks, report.largest)
        report = replace(report, split=split, resumed=True)
    announce(prober.asked, prober.ranks, report)
    if not prober.settings.use_maximum_batch_size and configured.micro_batch > report.largest:
        raise ConfigError(
            "batch_size",
            configured.micro_batch,
            f"does not fit: {report.reason()}",
            f"Use {report.largest}",
        )
    return DecidedBatch(report.split, _by_rows(prober), report.largest, report)


def _as_it_was(prober: Prober, rows: RowsToTry, growth: GrowthState) -> DecidedBatch:
    """What the run has trained with in the same place; a step that runs out of memory takes less."""
    assert growth.largest is not None
    split = growth.now_on(rows.configured.ranks, growth.largest)
    if prober.ranks.is_zero:
        log.info(
            f"batch_size {split.micro_batch}: as the checkpoint has it, from the same ranks, device and "
            "config, so it is not tried again."
        )
    return DecidedBatch(split, _by_rows(prober), growth.largest)


def _fastest(
    prober: Prober, rows: RowsToTry, saved: TrainingState | None, planner: RankPlanner | None
) -> DecidedBatch:
    known, rank = saved.knobs if saved else None, planner.ranked if planner else None
    report = find_fastest(prober, rows, known, rank)
    compared = [each for each in report.timed if each.predicted and each.measured]
    if planner is not None and compared and not prober.compiled:
        planner.learn_from(compared[0].measured, compared[0].predicted)  # type: ignore[arg-type]
    announce(prober.asked, prober.ranks, report)
    return DecidedBatch(report.split, ByRows("divisor"), report=report)


def _in_tokens(prober: Prober, rows: RowsToTry, saved: TrainingState | None) -> DecidedBatch:
    """A token budget, found or confirmed; none if it is slower, or was when the run began."""
    if rows.data.rows.packed:
        log.info("token_budget has no effect: packed rows are all full.")
        return DecidedBatch(rows.configured, _by_rows(prober))
    known, without = saved.token_budget if saved else None, _by_rows(prober, instead_of_budget=True)
    if known == [] and prober.settings.token_budget is True:
        log.info("No token budget: it was slower when this run began (the checkpoint says).")
        return DecidedBatch(rows.configured, without)
    prober.enter("looking up the lengths of all rows")
    if rows.order.samples and images_of(rows.data.dataset[0]):
        raise token_budget_with_images(prober.settings)
    lengths = rows.data.rows.padded(rows.lengths.all(say_progress=prober.ranks.is_zero))
    report = find_token_budget(prober, rows, lengths, known)
    announce(prober.asked, prober.ranks, report)
    if not report.used:
        return DecidedBatch(rows.configured, without, report=report)
    # Tokens are bounded, not rows.
    return DecidedBatch(rows.configured, report.micro_batches, rows.per_rank, report)


def announce(asked: Asked, ranks: Ranks, report: Report) -> None:
    """Log what was found, and write it to files; on rank 0.

    What becomes of the batch, the steps and the learning rate comes last: it is what training begins with.
    """
    if not ranks.is_zero:
        return
    with not_essential("The report of the search"):
        files = write(report, Path(asked["output_dir"]))
        log.info(f"Details: {', '.join(map(str, files))}")
    if overrides := report.overrides():
        log.info(f"{report.use_of_overrides}: {overrides}")
    log.info(report.text())
