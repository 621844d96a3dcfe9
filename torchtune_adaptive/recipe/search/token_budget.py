"""The token budget of a run: found by trials at several row lengths, kept by every micro-batch.

The longest rows come first: a search finds how many of them fit. At each shorter length the same number of
tokens is known to fit and needs no trial (see ``packing.Budget``). What fits beyond that is estimated from
what was measured, and the estimate is tried once: if it fails, the known size stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torchtune_adaptive.common import ConfigError, counted
from torchtune_adaptive.core import (
    Budget,
    ByRows,
    ByTokens,
    MicroBatches,
    Probe,
    SizeTrial,
    strategies,
)
from torchtune_adaptive.recipe.search.budget_report import (
    BudgetReport,
    LengthTrial,
    Throughput,
    padding_shares,
)
from torchtune_adaptive.recipe.search.prober import Prober, RowsToTry
from torchtune_adaptive.recipe.search.remembered_budget import RememberedBudget
from torchtune_adaptive.recipe.search.validation_size import fit_validation
from torchtune_adaptive.recipe.settings.adaptive import BLOCK, AdaptiveSettings
from torchtune_adaptive.recipe.settings.fingerprint import search_facts

log = logging.getLogger(__name__)

TrialAt = Callable[[int, int], SizeTrial]
"""A function that tries a number of rows, of a length."""

_ESTIMATES_ARE_SHORT_BY = 0.03
"""The share of free memory that estimates leave: they miss by as much, and a failed trial is wasted."""
_SLOWER_BY = 0.05
"""The share of throughput that a budget must cost to be given up: the fastest of several steps of one kind
vary by less."""
_ROUNDS = 4
"""Times that a step is measured with and without a budget before the budget is given up."""
_FIRST_ROUNDS = 2
"""The same before it is used: one step may be slow by chance."""


def find_budget(
    trial_at: TrialAt, lengths: Sequence[int], most_rows: int
) -> tuple[Budget | None, list[LengthTrial]]:
    """How many rows of each length fit; None if not even one of the longest does.

    Args:
        trial_at: a function that tries them.
        lengths: the lengths to measure at, descending.
        most_rows: the most rows that a micro-batch may have: those that a step may have on one rank.
    """
    trials: list[LengthTrial] = []

    def try_at(rows: int, length: int) -> SizeTrial:
        trial = trial_at(rows, length)
        log.info(f"{length} tokens a row: {trial.line()}")
        trials.append(LengthTrial(length, trial))
        return trial

    longest = lengths[0]
    found = strategies.find_largest(
        "extrapolate", range(1, most_rows + 1), lambda rows: try_at(rows, longest)
    )
    if found.size is None:
        return None, trials
    measured = {longest: found.size}
    for length in lengths[1:]:
        # As many tokens in shorter rows take no more memory: no trial needed.
        rows = min(most_rows, measured[min(measured)] * min(measured) // length)
        measured[length] = rows
        estimate = min(most_rows, _estimate(trials, length))
        if rows < estimate and try_at(estimate, length).fits:
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


def confirm_budget(
    tokens: int, trial_at: TrialAt, longest: int, most_rows: int
) -> tuple[Budget, LengthTrial]:
    """Take a budget that the user gives, if the longest rows in it fit.

    Raises:
        ConfigError: they do not.
    """
    if tokens < longest:
        raise ConfigError(
            "adaptive_batching.token_budget",
            tokens,
            f"is less than the longest row ({longest} tokens)",
            f"Use {longest} or more, or cut rows with tokenizer.max_seq_len",
        )
    trial = trial_at(min(tokens // longest, most_rows), longest)
    log.info(f"{longest} tokens a row: {trial.line()}")
    if not trial.fits:
        raise ConfigError(
            "adaptive_batching.token_budget",
            tokens,
            f"does not fit: {trial.deciding.trouble} with {counted(trial.size, 'row')} of {longest} tokens",
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
    prober: Prober, rows: RowsToTry, row_lengths: Sequence[int], known: Budget | None = None
) -> BudgetReport:
    """Find the token budget on the run itself, which is afterwards as it was before.

    Args:
        prober: the maker of trials of the run's step with its ``rows``.
        row_lengths: the length of every row of the data.
        known: the budget that an earlier part of this run has found; it is confirmed by one trial.
    """
    settings = prober.settings
    longest = _longest(settings, row_lengths)
    worst = prober.worst_case(rows.data, rows.lengths, longest)
    log.info(f"Searching for the token budget: the longest row has {longest} tokens.")
    # A step has as many micro-batches as it takes.
    with prober.probe(accumulation=lambda size: 2) as probe:
        first = probe.prime(worst.of_length(longest).batch)
        if not first.fits:
            raise worst.nothing_fits(first)
        most_rows = rows.per_rank if settings.grows else rows.configured.rows
        budget, trials = _find_or_confirm(
            prober,
            lambda size, length: probe.trial(size, worst.of_length(length).batch),
            lengths_to_measure(row_lengths, longest),
            most_rows,
            known,
        )
        if budget is None:
            raise worst.nothing_fits(trials[-1].trial)
        buckets = length_buckets(longest, min(row_lengths)) if prober.compiled else ()
        ignored = prober.step.objective.ignored
        by_tokens = ByTokens(budget, row_lengths, rows.data.tokenizer.pad_id, ignored, buckets)
        speeds = _speeds(prober, probe, rows, by_tokens)
        validation = fit_validation(prober, probe, rows, lambda length: budget.tokens // length)
    without, with_budget = map(Throughput, padding_shares(by_tokens, rows.configured), speeds)
    # A budget of the user's own is meant, a checkpoint's is kept, and a batch that grows needs one.
    is_ours = settings.token_budget is True and known is None and not settings.grows
    # Without it, micro-batches of the longest rows may run out of memory.
    fits_without = rows.configured.micro_batch <= budget.rows(budget.longest)
    used = not (is_ours and fits_without and is_slower(*speeds))
    return BudgetReport(by_tokens, trials, rows.configured, without, with_budget, used, validation)


def _longest(settings: AdaptiveSettings, row_lengths: Sequence[int]) -> int:
    """The row length that the budget must hold for."""
    longest = max(row_lengths)
    if settings.probe_length is not None and settings.probe_length < longest:
        raise ConfigError(
            f"{BLOCK}.probe_length",
            settings.probe_length,
            f"is shorter than row {row_lengths.index(longest)} of the data ({longest} tokens)",
            "Leave it out, or cut rows with tokenizer.max_seq_len",
        )
    return settings.probe_length or longest


def _find_or_confirm(
    prober: Prober,
    trial_at: TrialAt,
    lengths: Sequence[int],
    most_rows: int,
    known: Budget | None,
) -> tuple[Budget | None, list[LengthTrial]]:
    """A budget that the user gives, or that an earlier search found, confirmed by one trial; or a search."""
    settings = prober.settings
    if settings.token_budget is not True:
        budget, trial = confirm_budget(settings.token_budget, trial_at, lengths[0], most_rows)
        return budget, [trial]
    about = search_facts(
        prober.cfg,
        settings,
        lengths=lengths,
        most_rows=most_rows,
        ranks=prober.ranks.size,
        device=prober.step.memory.name,
        capacity=prober.capacity(),
    )
    remembered = RememberedBudget.of(settings.cache, prober.ranks, about)
    return find_or_confirm(trial_at, lengths, most_rows, known, remembered)


def find_or_confirm(
    trial_at: TrialAt,
    lengths: Sequence[int],
    most_rows: int,
    known: Budget | None,
    remembered: RememberedBudget,
) -> tuple[Budget | None, list[LengthTrial]]:
    """The budget that an earlier search has found, if the longest rows in it fit; or a search.

    Args:
        trial_at: a function that tries a number of rows, of a length.
        lengths: the lengths to measure at, descending.
        most_rows: the most rows that a micro-batch may have.
        known: the budget of an earlier part of this run, which it keeps to if it can.
        remembered: the one that an earlier run has found; what is found now takes its place.
    """
    budget, trials = _confirmed(known or remembered.get(), trial_at, lengths[0])
    if budget is not None and known is None and _has_room_for_another_row(trials[0], most_rows):
        # Whatever was short of memory then, e.g. because of another process, is not any more.
        log.info("There is room for more now; searching again.")
        budget = None
    if budget is None:
        budget, trials = find_budget(trial_at, lengths, most_rows)
    if budget is not None:
        remembered.put(budget)
    return budget, trials


def _confirmed(
    earlier: Budget | None, trial_at: TrialAt, longest: int
) -> tuple[Budget | None, list[LengthTrial]]:
    """A budget that was found before, if it is for these rows and the longest still fit."""
    if earlier is None or earlier.longest != longest:
        return None, []
    log.info("A token budget was found before; verifying with one trial.")
    trial = LengthTrial(longest, trial_at(earlier.rows(longest), longest))
    log.info(f"{longest} tokens a row: {trial.trial.line()}")
    if trial.trial.fits:
        return earlier, [trial]
    log.info("It no longer fits; searching again.")
    return None, []


def _has_room_for_another_row(longest: LengthTrial, most_rows: int) -> bool:
    """Whether one more row of the longest would fit even if all memory were that of rows."""
    rows, deciding = longest.trial.size, longest.trial.deciding
    return rows < most_rows and deciding.peak_bytes * (rows + 1) <= deciding.usable_bytes * rows


def is_slower(without: float | None, with_budget: float | None) -> bool:
    """Whether a budget costs throughput, by a clear margin; not if one of the two was not measured."""
    if without is None or with_budget is None:
        return False
    return with_budget < (1 - _SLOWER_BY) * without


def best_throughputs(
    without: Callable[[], float | None], with_budget: Callable[[], float | None]
) -> tuple[float | None, float | None]:
    """The highest throughput without a budget and with it; measured more often if the budget seems slower.

    Both functions measure the throughput of a step, and give None if it does not fit.
    """
    best: tuple[float | None, float | None] = (0.0, 0.0)
    for number in range(1, _ROUNDS + 1):
        measured = without(), with_budget()
        if None in measured:
            return measured  # there is nothing to compare
        best = max(best[0] or 0.0, measured[0] or 0.0), max(best[1] or 0.0, measured[1] or 0.0)
        if number >= _FIRST_ROUNDS and not is_slower(*best):
            break
    return best


def _speeds(
    prober: Prober, probe: Probe, rows: RowsToTry, by_tokens: ByTokens
) -> tuple[float | None, float | None]:
    """Tokens per second and rank in the first step, without the budget and with it; None if not measured.

    The same on all ranks, since a step takes as long as it takes the slowest.
    """
    split = rows.configured
    if prober.compiled or split.rows > rows.per_rank:
        return None, None  # most of what would be measured is compiling; or there is no full step
    tokens = sum(by_tokens.row_lengths[sample] for sample in rows.first_samples) / split.ranks

    def measured(what: str, micro_batches: MicroBatches) -> float | None:
        step = rows.first_step(prober.ranks, micro_batches, micro_batches.full_size(split))
        seconds = probe.timed(what, step)
        return tokens / seconds[0] if seconds else None

    return best_throughputs(
        lambda: measured("without a token budget", ByRows("none")),
        lambda: measured("with the token budget", by_tokens),
    )


def length_buckets(longest: int, shortest: int, count: int = 8) -> list[int]:
    """A few lengths from the shortest to the longest, each the same share longer than the one before."""
    ratio = (longest / max(shortest, 1)) ** (1 / max(count - 1, 1))
    return sorted({min(longest, -(-round(shortest * ratio**i) // 8) * 8) for i in range(count)})
