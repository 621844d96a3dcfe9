"""The way from a run that is set up to its batch size: candidates, memory of earlier runs, search, report."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.budget_report import BudgetReport, Worth, padding_shares
from torchtune_adaptive.build import Data
from torchtune_adaptive.config import BLOCK, AdaptiveSettings
from torchtune_adaptive.consensus import Ranks
from torchtune_adaptive.errors import ConfigError, NothingFits
from torchtune_adaptive.packing import Budget
from torchtune_adaptive.prediction import Prediction
from torchtune_adaptive.probe import Probe, SizeTrial
from torchtune_adaptive.report import SearchReport, Split, trial_line
from torchtune_adaptive.result_cache import facts, found_sizes
from torchtune_adaptive.rows import WorstCase, worst_case
from torchtune_adaptive.sampler import Loader, SampleOrder
from torchtune_adaptive.search import SearchResult, Status, candidates, search
from torchtune_adaptive.step import TrainStep
from torchtune_adaptive.token_budget import (
    LengthTrial,
    TokenPacker,
    confirm,
    find_budget,
    length_buckets,
    lengths_to_measure,
)
from torchtune_adaptive.watchdog import Watchdog

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
    if settings.keep_global_batch:
        rounding, ceiling = "divisor", rows_per_step
    else:
        rounding, ceiling = settings.rounding, rows_per_rank // asked.accumulation
    if settings.ceiling is not None:
        ceiling = min(ceiling, settings.ceiling)
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
    prediction: Prediction | None = None,
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

    probe = _probe(
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
        about = facts(
            cfg,
            settings,
            row_length=worst.length,
            packed=data.packed,
            ranks=ranks.size,
            device=step.memory.name,
            capacity=capacity,
        )

        def foretold(last: SizeTrial | None) -> int | None:
            watchdog.enter("predicting the batch size", patience=None)
            rows = None
            if prediction is not None:
                if last is not None:
                    prediction.learn_from(last, accumulation(last.size))
                rows = prediction.largest(worst.length, capacity)
            return ranks.from_rank_zero(rows)

        result = _search_or_remember(settings, sizes, probe, about, known, ranks, foretold)
    if settings.search == "predict":
        watchdog.enter("learning how good the prediction was", patience=None)
    was_a_search = result.status in (Status.NEXT_DOES_NOT_FIT, Status.CEILING)
    if prediction is not None and was_a_search:
        last = next(trial for trial in result.trials if trial.size == result.size)
        prediction.learn_from(last, accumulation(last.size))
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


def find_token_budget(
    *,
    cfg: DictConfig,
    settings: AdaptiveSettings,
    data: Data,
    order: SampleOrder,
    row_lengths: Sequence[int],
    split: Split,
    step: TrainStep,
    ranks: Ranks,
    watchdog: Watchdog,
    known: Budget | None = None,
) -> BudgetReport:
    """Find the token budget on the run itself, which is afterwards as it was before.

    Args:
        cfg: what the config asks for.
        settings: how to search.
        data: what the trials are made of.
        order: of the samples.
        row_lengths: of every row of the data.
        split: how a step is put together without a budget.
        step: the step that training will use.
        ranks: the ranks of the run.
        watchdog: is told about each phase.
        known: what an earlier part of this run has found; it is confirmed by one trial.
    """
    longest = settings.probe_length or max(row_lengths)
    if max(row_lengths) > longest:
        index = max(range(len(row_lengths)), key=row_lengths.__getitem__)
        raise ConfigError(
            f"{BLOCK}.probe_length",
            longest,
            f"is less than row {index} of the data has, {row_lengths[index]} tokens",
            "Leave it out, or cut rows with tokenizer.max_seq_len",
        )
    worst = worst_case(data.dataset, data.tokenizer, False, longest, ranks)
    length_now = longest
    log.info(f"Searching for the token budget: the longest row has {longest} tokens.")
    probe = _probe(
        cfg,
        settings,
        step,
        watchdog,
        ranks,
        batch=lambda rows: worst.of_length(length_now).batch(rows, data.collate),
        accumulation=lambda rows: 2,  # a step has as many micro-batches as it takes
    )

    def probe_at(length: int) -> Probe:
        nonlocal length_now
        length_now = length
        return probe

    with probe:
        first = probe.prime()
        if not first.fits:
            raise nothing_fits(first, worst)
        most_rows = order.rows_per_rank if settings.grows else split.rows
        budget, trials = _find_budget(settings, row_lengths, probe_at, longest, most_rows, known)
        if budget is None:
            raise nothing_fits(trials[-1].trial, worst)
        compiled = cfg.get("compile", False)
        packer = TokenPacker(
            budget,
            row_lengths,
            data.tokenizer.pad_id,
            step.loss_fn.ignore_index,  # type: ignore[arg-type]
            length_buckets(budget.longest, min(row_lengths)) if compiled else (),
        )
        # With a compiled model most of what would be measured is compiling.
        can_be_timed = not compiled and split.rows <= order.rows_per_rank
        speeds = _speeds(probe, data, order, packer, split, ranks) if can_be_timed else (None, None)
    without, under = map(Worth, padding_shares(packer, split), speeds)
    return BudgetReport(packer, trials, split, without, under)


def _speeds(
    probe: Probe,
    data: Data,
    order: SampleOrder,
    packer: TokenPacker,
    split: Split,
    ranks: Ranks,
) -> tuple[float | None, ...]:
    """Tokens per second and rank in the first step, without the budget and under it."""
    samples = order.epoch(0)[: split.global_batch]
    tokens = sum(packer.row_lengths[sample] for sample in samples) / ranks.size

    def measured(what: str, size: int, packer: TokenPacker | None) -> float | None:
        loader = Loader(data.dataset, data.collate, order, ranks.rank, ranks.size, packer=packer)
        step = loader.epoch(0).step(split.rows, size)
        seconds = probe.timed(what, [micro_batch.batch for micro_batch in step])
        return tokens / seconds if seconds else None

    return (
        measured("without a token budget", split.micro_batch, None),
        measured("under the token budget", packer.largest, packer),
    )


def _find_budget(
    settings: AdaptiveSettings,
    row_lengths: Sequence[int],
    probe_at: Callable[[int], Probe],
    longest: int,
    most_rows: int,
    known: Budget | None,
) -> tuple[Budget | None, list[LengthTrial]]:
    if settings.token_budget is not True:
        budget, trial = confirm(settings.token_budget, probe_at(longest), longest, most_rows)
        return budget, [trial]
    if known is not None and known.longest == longest:
        trial = LengthTrial(longest, probe_at(longest).trial(known.rows(longest)))
        if trial.trial.fits:
            return known, [trial]
        log.info("What the checkpoint's budget allows does not fit any more; searching anew.")
    return find_budget(probe_at, lengths_to_measure(row_lengths, longest), most_rows)


def _probe(
    cfg: DictConfig,
    settings: AdaptiveSettings,
    step: TrainStep,
    watchdog: Watchdog,
    ranks: Ranks,
    *,
    batch: Callable[[int], dict[str, Any]],
    accumulation: Callable[[int], int],
) -> Probe:
    compiled = cfg.get("compile", False)
    if compiled and step.device.type == "cpu":
        log.info(
            "The simulated device sees single operations, so compiled regions run eager in trials."
        )
    return Probe(
        step=step,
        batch=batch,
        accumulation=accumulation,
        headroom=settings.headroom,
        ranks=ranks,
        # How long a rank compiles is its own affair.
        entering=lambda phase: watchdog.enter(
            phase, patience=None if compiled else settings.rank_timeout
        ),
        compiled=compiled,
    )


def announce(report: SearchReport | BudgetReport, output_dir: Path) -> None:
    """Say what was found, and write it down."""
    log.info(report.text())
    files = report.write(output_dir)
    log.info(f"In detail: {', '.join(map(str, files))}")
    if isinstance(report, SearchReport) and report.uses_what_was_found:
        log.info(f"To use it without searching: {report.overrides()}")


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
    if ranks.rank == 0 and result.size is not None:
        cache.put(about, result.size)
    return SearchResult(result.size, result.status, tried + result.trials)


def nothing_fits(trial: SizeTrial, worst: WorstCase) -> NothingFits:
    """Why not even one row can be trained, and what would change that."""
    failed = trial.deciding
    return NothingFits(
        f"Not even {trial.size} row of {worst.length} tokens ({worst.source}) fits: {failed.trouble} on rank "
        f"{trial.deciding_rank}, which needed more than {failed.peak_bytes:,} bytes and may use "
        f"{failed.usable_bytes:,}. Shorten the rows (tokenizer.max_seq_len), turn on "
        "enable_activation_checkpointing, use LoRA or QLoRA, use more ranks, or allow more memory "
        f"({BLOCK}.memory_limit, {BLOCK}.headroom)."
    )
