"""The token budget of a run: found by trials at several row lengths, kept by every micro-batch.

The longest rows come first: how many of them fit is searched for. Each shorter length may have as many
tokens without a trial (see ``packing.Budget``). What fits beyond that is estimated from what has been
measured, and the estimate is tried once: if it fails, what needed no trial stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from omegaconf import DictConfig

from torchtune_adaptive.batching.packing import Budget
from torchtune_adaptive.batching.split import Split
from torchtune_adaptive.batching.strategies import search
from torchtune_adaptive.data.dataset import Data
from torchtune_adaptive.data.loader import Loader, SampleOrder
from torchtune_adaptive.data.micro_batches import ByTokens, length_buckets
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.ranks.agreement import Ranks
from torchtune_adaptive.ranks.watchdog import Watchdog
from torchtune_adaptive.search.budget_report import BudgetReport, Throughput, padding_shares
from torchtune_adaptive.search.probe import Probe, new_probe, nothing_fits
from torchtune_adaptive.search.trial import LengthTrial, SizeTrial, trial_line
from torchtune_adaptive.search.worst_case import worst_case
from torchtune_adaptive.settings.adaptive import BLOCK, AdaptiveSettings
from torchtune_adaptive.step.train_step import TrainStep

log = logging.getLogger(__name__)

_ESTIMATES_ARE_SHORT_BY = 0.03
"""Of the room that is left: estimates miss by as much, and a trial that fails is worth nothing here."""


def find_budget(
    probe_at: Callable[[int], Probe], lengths: Sequence[int], most_rows: int
) -> tuple[Budget | None, list[LengthTrial]]:
    """How many rows of each length fit; None if not even one of the longest does.

    Args:
        probe_at: tries sizes at one length.
        lengths: to measure at, descending.
        most_rows: that a micro-batch may have: those that a step may have on one rank.
    """
    trials: list[LengthTrial] = []

    def try_at(length: int, probe: Probe, rows: int) -> SizeTrial:
        trial = probe.trial(rows)
        log.info(f"{length} tokens a row: {trial_line(trial)}")
        trials.append(LengthTrial(length, trial))
        return trial

    longest = lengths[0]
    probe = probe_at(longest)
    found = search(
        "extrapolate", range(1, most_rows + 1), lambda rows: try_at(longest, probe, rows)
    )
    if found.size is None:
        return None, trials
    measured = {longest: found.size}
    for length in lengths[1:]:
        # As many tokens in shorter rows take no more memory: no trial needed.
        rows = min(most_rows, measured[min(measured)] * min(measured) // length)
        measured[length] = rows
        estimate = min(most_rows, _estimate(trials, length))
        if rows < estimate and try_at(length, probe_at(length), estimate).fits:
            measured[length] = estimate
        if measured[length] == most_rows:
            break
    return Budget(tuple(sorted(measured.items()))), trials


def _estimate(trials: Sequence[LengthTrial], length: int) -> int:
    """Rows of ``length`` tokens that should fit, if memory is a constant and so much for each token.

    By the two largest that fitted, of which the larger is nearest to the limit. Shorter rows have less
    attention for each token, so the line errs to the safe side.
    """
    fitting = sorted(
        {
            (each.trial.size * each.length, each.trial.deciding.peak_bytes, each.trial.free_bytes)
            for each in trials
            if each.trial.fits
        }
    )
    if len(fitting) < 2:
        return 0
    (fewer, less, _), (tokens, peak, free) = fitting[-2:]
    if tokens == fewer or peak <= less:
        return 0
    each_token = (peak - less) / (tokens - fewer)
    room = free * (1 - _ESTIMATES_ARE_SHORT_BY)
    return int((tokens + room / each_token) // length)


def confirm(tokens: int, probe: Probe, longest: int, most_rows: int) -> tuple[Budget, LengthTrial]:
    """Take a budget that the user gives, if the longest rows in it fit.

    Raises:
        ConfigError: they do not.
    """
    if tokens < longest:
        raise ConfigError(
            "adaptive_batching.token_budget",
            tokens,
            f"is less than the longest row has, {longest} tokens",
            f"Use {longest} or more, or cut rows with tokenizer.max_seq_len",
        )
    trial = probe.trial(min(tokens // longest, most_rows))
    log.info(f"{longest} tokens a row: {trial_line(trial)}")
    if not trial.fits:
        raise ConfigError(
            "adaptive_batching.token_budget",
            tokens,
            f"does not fit: {trial.deciding.trouble} with {trial.size} rows of {longest} tokens",
            "Use less, or True to have it found",
        )
    return Budget.of_tokens(tokens, longest), LengthTrial(longest, trial)


def lengths_to_measure(row_lengths: Sequence[int], longest: int) -> list[int]:
    """The longest row that can be, then halves of it, down to the median of the data."""
    middle = sorted(row_lengths)[len(row_lengths) // 2]
    lengths = [longest]
    while lengths[-1] // 2 >= max(middle, 2):
        lengths.append(lengths[-1] // 2)
    return lengths


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
    probe = new_probe(
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
        packer = ByTokens(
            budget,
            row_lengths,
            data.tokenizer.pad_id,
            step.objective.ignored,
            length_buckets(budget.longest, min(row_lengths)) if compiled else (),
        )
        # With a compiled model most of what would be measured is compiling.
        can_be_timed = not compiled and split.rows <= order.rows_per_rank
        speeds = _speeds(probe, data, order, packer, split, ranks) if can_be_timed else (None, None)
    without, under = map(Throughput, padding_shares(packer, split), speeds)
    return BudgetReport(packer, trials, split, without, under)


def _speeds(
    probe: Probe,
    data: Data,
    order: SampleOrder,
    packer: ByTokens,
    split: Split,
    ranks: Ranks,
) -> tuple[float | None, ...]:
    """Tokens per second and rank in the first step, without the budget and under it."""
    samples = order.epoch(0)[: split.global_batch]
    tokens = sum(packer.row_lengths[sample] for sample in samples) / ranks.size

    def measured(what: str, size: int, packer: ByTokens | None) -> float | None:
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
