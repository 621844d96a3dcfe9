"""Find the largest micro-batch that fits: candidates, cache, prediction, trials."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass

from torchtune_adaptive.common import ConfigError, counted
from torchtune_adaptive.core import Rounding, SizeTrial, Split, candidates
from torchtune_adaptive.recipe.plan.background import PeakPlanner
from torchtune_adaptive.recipe.search.prober import Prober, RowsToTry
from torchtune_adaptive.recipe.search.size_report import FEW_STEPS, SearchReport
from torchtune_adaptive.recipe.search.sizing import InRows
from torchtune_adaptive.recipe.settings.adaptive import BLOCK, AdaptiveSettings

log = logging.getLogger(__name__)


def find_micro_batch(
    prober: Prober, rows: RowsToTry, known: int | None = None, planner: PeakPlanner | None = None
) -> SearchReport:
    """Search on the run itself, which is afterwards as it was before. One trial confirms the size that is
    ``known`` from an earlier part of this run; on rank 0, a planner predicts the size."""
    started, settings, configured = time.perf_counter(), prober.settings, rows.configured
    sample = rows.data.rows.sample
    limit = limit_of(
        settings,
        configured,
        rows.per_rank,
        sample=sample,
        max_steps=prober.asked["max_steps_per_epoch"],
        known=known,
    )
    sizes = possible_sizes(settings, configured, limit.size)
    # Not that of fewer sizes: what fits is the same, and a cached size is confirmed in any case.
    largest_candidate = possible_sizes(settings, configured, limit.possible or limit.size)[-1]
    worst = prober.worst_case(rows.data, rows.lengths, settings.probe_length)
    log.info(
        f"Searching for the largest micro-batch with {sample}s of {worst.size} ({worst.source})."
    )

    def accumulation(size: int) -> int:
        most = 2 if settings.grow_past_memory else 1
        return max(split_for(settings, configured, size).accumulation, most)

    def learn_from(trial: SizeTrial) -> None:
        if planner is not None:
            planner.learn_from(trial.size, trial.usage, accumulation(trial.size))

    with prober.primed(accumulation, worst.batch, worst.nothing_fits) as (probe, first):
        if planner is not None and worst.size.images > 1:
            log.info("No prediction: it would be for rows with one image. Searching without it.")
            planner = None
        capacity = prober.capacity()

        def predicted(after: SizeTrial | None) -> int:
            prober.enter("predicting the batch size")
            if after is not None:
                learn_from(after)
            size = planner.largest(worst.length, capacity) if planner is not None else None
            return prober.ranks.from_rank_zero(size) or 0

        found = InRows(
            trial=lambda size: probe.trial(size, worst.batch),
            sizes=sizes,
            strategy=settings.search,
            nothing_fits=worst.nothing_fits,
            about=prober.facts(
                row=asdict(worst.size),
                packed=rows.data.rows.packed,
                largest_candidate=largest_candidate,
            ),
            known=known,
            first=first,
            predicted=predicted,
        ).find(prober.ranks, settings.cache)
        assert found.size is not None, "it raises where nothing fits"
        largest = found.size
        validation = prober.fit_validation(probe, rows, lambda _: largest)
    if settings.search == "predict":
        prober.enter("learning how good the prediction was")
    if found.status.is_proof:
        learn_from(next(trial for trial in found.trials if trial.size == largest))
    after = split_for(settings, configured, largest)
    return SearchReport(
        result=found,
        before=configured,
        split=after if settings.use_maximum_batch_size else configured,
        strategy=settings.search,
        row=worst.size,
        row_source=worst.source,
        device=prober.step.memory.name,
        headroom=settings.headroom,
        seconds=time.perf_counter() - started,
        samples=rows.order.per_epoch,
        lr=prober.asked.cfg.optimizer.get("lr"),
        limit=limit.reason if largest == sizes[-1] else None,
        validation=validation,
        sample=sample,
    )


@dataclass(frozen=True)
class Limit:
    """The largest micro-batch that a search may find, whatever memory there is."""

    size: int
    reason: str
    possible: int | None = None
    """The largest with which an epoch has a step at all, where ``size`` leaves it more of them."""


def limit_of(
    settings: AdaptiveSettings,
    configured: Split,
    rows_per_rank: int,
    *,
    sample: str = "row",
    max_steps: int | None = None,
    known: int | None = None,
) -> Limit:
    """What bounds a search besides memory: a setting, the data, or the steps that an epoch should have.

    Args:
        settings: the ceiling, and whether the global batch must stay.
        configured: the batch that the config asks for.
        rows_per_rank: the rows that each rank has in an epoch.
        sample: what a row is called.
        max_steps: the most steps in an epoch, where the config has such a limit.
        known: the size that an earlier part of the run has found, and may keep.
    """
    accumulation, rows_per_step = configured.accumulation, configured.rows
    needed = rows_per_step if settings.keep_global_batch else accumulation
    if rows_per_rank < needed:
        raise ConfigError(
            "gradient_accumulation_steps",
            accumulation,
            f"leaves no full step in an epoch: a step needs at least {counted(needed, 'sample')} per rank, "
            f"and the data has {rows_per_rank}",
            "Lower it, lower batch_size, or use more data",
        )
    if settings.keep_global_batch:
        limit = Limit(rows_per_step, f"a step has {counted(rows_per_step, sample)} per rank")
    else:
        rows = counted(rows_per_rank, sample)
        limit = Limit(
            rows_per_rank // accumulation,
            f"the data has {rows} per rank, and an epoch needs a step",
        )
    if settings.ceiling is not None:
        reason = f"{BLOCK}.ceiling is {settings.ceiling}"
        return Limit(settings.ceiling, reason) if settings.ceiling < limit.size else limit
    if settings.keep_global_batch or not settings.use_maximum_batch_size:
        return limit
    # With little data on a large device a batch of all of it fits, and a run of a few steps learns nothing.
    steps = max(1, rows_per_rank // rows_per_step)
    steps = min(steps, FEW_STEPS, max_steps or steps)
    most = max(rows_per_rank // (steps * accumulation), known or 0)
    if steps == 1 or most >= limit.size:
        return limit
    return Limit(
        most,
        f"a larger one would leave fewer than {counted(steps, 'optimizer step')} in an epoch; "
        f"{BLOCK}.ceiling=N allows it",
        possible=limit.size,
    )


def possible_sizes(settings: AdaptiveSettings, configured: Split, most: int) -> tuple[int, ...]:
    """The micro-batches that a search may find, up to a limit."""
    rounding: Rounding = "divisor" if settings.keep_global_batch else settings.rounding
    return candidates(rounding, most, configured.rows)


def split_for(settings: AdaptiveSettings, configured: Split, size: int) -> Split:
    """How a step is put together with micro-batches of ``size`` rows."""
    if settings.keep_global_batch:
        return configured.in_micro_batches(size)
    return Split(size, configured.accumulation, configured.ranks)
