"""The way from a run that is set up to its batch size: candidates, memory of earlier runs, search, report."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.batching.split import Split
from torchtune_adaptive.batching.strategies import (
    Rounding,
    SearchResult,
    Status,
    candidates,
    search,
)
from torchtune_adaptive.cache import Cache, cache_folder
from torchtune_adaptive.data.dataset import Data
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.plan.background import BackgroundPlanner
from torchtune_adaptive.ranks.agreement import Ranks
from torchtune_adaptive.ranks.watchdog import Watchdog
from torchtune_adaptive.search.probe import Probe, new_probe, nothing_fits
from torchtune_adaptive.search.report import SearchReport
from torchtune_adaptive.search.trial import SizeTrial, trial_line
from torchtune_adaptive.search.worst_case import worst_case
from torchtune_adaptive.settings.adaptive import AdaptiveSettings
from torchtune_adaptive.settings.fingerprint import search_facts
from torchtune_adaptive.step.train_step import TrainStep

log = logging.getLogger(__name__)


def possible_sizes(settings: AdaptiveSettings, asked: Split, rows_per_rank: int) -> tuple[int, ...]:
    """The micro-batches that a search may find: at least one full step must remain in an epoch.

    Args:
        settings: rounding, ceiling, and whether the global batch must stay.
        asked: what the config asks for.
        rows_per_rank: the rows that each rank has in an epoch.
    """
    rows_per_step = asked.micro_batch * asked.accumulation
    needed = rows_per_step if settings.keep_global_batch else asked.accumulation
    if rows_per_rank < needed:
        raise ConfigError(
            "gradient_accumulation_steps",
            asked.accumulation,
            f"leaves no full step in an epoch: a step needs at least {needed} rows per rank, "
            f"and the data has {rows_per_rank}",
            "Lower it, lower batch_size, or use more data",
        )
    ceiling = rows_per_step if settings.keep_global_batch else rows_per_rank // asked.accumulation
    if settings.ceiling is not None:
        ceiling = min(ceiling, settings.ceiling)
    rounding: Rounding = "divisor" if settings.keep_global_batch else settings.rounding
    return candidates(rounding, ceiling, rows_per_step)


def split_for(settings: AdaptiveSettings, asked: Split, size: int) -> Split:
    """How a step is put together with micro-batches of ``size`` rows."""
    accumulation = asked.accumulation
    if settings.keep_global_batch:
        accumulation = asked.micro_batch * asked.accumulation // size
    return Split(size, accumulation, asked.ranks)


def find_batch_size(
    *,
    cfg: DictConfig,
    settings: AdaptiveSettings,
    data: Data,
    rows_per_rank: int,
    step: TrainStep,
    ranks: Ranks,
    watchdog: Watchdog,
    known: int | None = None,
    prediction: BackgroundPlanner | None = None,
) -> SearchReport:
    """Search on the run itself, which is afterwards as it was before.

    Args:
        cfg: what the config asks for.
        settings: how to search.
        data: what the trials are made of.
        rows_per_rank: the rows that each rank has in an epoch.
        step: the step that training will use.
        ranks: the ranks of the run.
        watchdog: is told about each phase.
        known: what an earlier part of this run has found; it is confirmed by one trial.
        prediction: on rank 0, of the size that should be found.
    """
    started = time.perf_counter()
    asked = Split(cfg.batch_size, cfg.gradient_accumulation_steps, ranks.size)
    sizes = possible_sizes(settings, asked, rows_per_rank)
    watchdog.enter("looking for the longest row", patience=None)
    worst = worst_case(data.dataset, data.tokenizer, data.packed, settings.probe_length, ranks)
    log.info(
        f"Searching for the largest micro-batch: rows of {worst.length} tokens ({worst.source})."
    )

    def accumulation(size: int) -> int:
        most = 2 if settings.grow_past_memory else 1
        return max(split_for(settings, asked, size).accumulation, most)

    probe = new_probe(
        cfg,
        settings,
        step,
        watchdog,
        ranks,
        batch=lambda size: worst.batch(size, data.collate),
        accumulation=accumulation,
    )

    with probe:
        first = probe.prime()
        if not first.fits:
            raise nothing_fits(first, worst)
        capacity = min(report.usable_bytes for report in first.reports)
        about = search_facts(
            cfg,
            settings,
            row_length=worst.length,
            packed=data.packed,
            largest_candidate=sizes[-1],
            ranks=ranks.size,
            device=step.memory.name,
            capacity=capacity,
        )

        def foretold(last: SizeTrial | None) -> int | None:
            watchdog.enter("predicting the batch size", patience=None)
            rows = None
            if prediction is not None:
                if last is not None:
                    prediction.learn_from(last.size, last.usage, accumulation(last.size))
                rows = prediction.largest(worst.length, capacity)
            return ranks.from_rank_zero(rows)

        result = _search_or_remember(settings, sizes, probe, about, known, ranks, foretold)
    if settings.search == "predict":
        watchdog.enter("learning how good the prediction was", patience=None)
    was_a_search = result.status in (Status.NEXT_DOES_NOT_FIT, Status.CEILING)
    if prediction is not None and was_a_search:
        last = next(trial for trial in result.trials if trial.size == result.size)
        prediction.learn_from(last.size, last.usage, accumulation(last.size))
    if result.size is None:
        raise nothing_fits(result.trials[-1], worst)
    return SearchReport(
        result=result,
        before=asked,
        after=split_for(settings, asked, result.size) if settings.use_maximum_batch_size else asked,
        strategy=settings.search,
        row_length=worst.length,
        row_source=worst.source,
        device=step.memory.name,
        headroom=settings.headroom,
        seconds=time.perf_counter() - started,
    )


def _search_or_remember(
    settings: AdaptiveSettings,
    sizes: tuple[int, ...],
    probe: Probe,
    about: Mapping[str, Any],
    known: int | None,
    ranks: Ranks,
    foretold: Callable[[SizeTrial | None], int | None],
) -> SearchResult[SizeTrial]:
    def trial(size: int) -> SizeTrial:
        outcome = probe.trial(size)
        log.info(trial_line(outcome))
        return outcome

    cache = found_sizes(settings.cache)
    # From rank 0, or ranks with other caches would part ways.
    remembered = known or ranks.from_rank_zero(cache.get(about))
    tried: tuple[SizeTrial, ...] = ()
    if remembered is not None and remembered in sizes:
        log.info(f"An earlier run like this one found {remembered} rows; confirming it.")
        tried = (trial(remembered),)
        if tried[0].fits:
            return SearchResult(remembered, Status.REMEMBERED, tried)
        log.info("It does not fit any more; searching anew.")
    result: SearchResult[SizeTrial] | None = None
    strategy = settings.search
    if strategy == "predict":
        strategy = "extrapolate"
        last: SizeTrial | None = None
        # A trial corrects the prediction; that may say that more would fit, and mostly says no such thing.
        while (at := bisect_right(sizes, foretold(last) or 0) - 1) >= 0:
            if last is not None and sizes[at] <= last.size:
                break
            tried += (trial(sizes[at]),)
            if not tried[-1].fits:
                break
            last = tried[-1]
        if last is not None:
            result = SearchResult(last.size, Status.PREDICTED, ())
        elif tried:
            log.info("It does not fit: the prediction missed. Searching without it.")
    result = result or search(strategy, sizes, trial)
    # A size at which a prediction stopped is not known to be the largest.
    was_a_search = result.status in (Status.NEXT_DOES_NOT_FIT, Status.CEILING)
    if ranks.rank == 0 and was_a_search and result.size is not None:
        cache.put(about, result.size)
    return SearchResult(result.size, result.status, tried + result.trials)


def found_sizes(cache: bool | str) -> Cache[int]:
    """The sizes that searches found, kept where the setting says."""
    return Cache(
        cache_folder(cache, "batch_sizes"), "batch size", lambda n: type(n) is int and n >= 1
    )
