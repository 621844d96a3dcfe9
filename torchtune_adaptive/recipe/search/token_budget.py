"""The token budget of a run: found on the run itself, and used if it does not cost throughput."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torchtune_adaptive.core import ByRows, ByTokens, MicroBatches, Probe
from torchtune_adaptive.recipe.data.length_files import Lengths
from torchtune_adaptive.recipe.search.budget_report import BudgetReport, Throughput, padding_shares
from torchtune_adaptive.recipe.search.in_tokens import InTokens, lengths_to_measure
from torchtune_adaptive.recipe.search.prober import Prober, RowsToTry
from torchtune_adaptive.recipe.search.worst_case import require_no_longer

log = logging.getLogger(__name__)

_SLOWER_BY = 0.05
"""The share of throughput that a budget must cost to be given up: the fastest of several steps of one kind
vary by less."""
_ROUNDS = 4
"""Times that a step is measured with and without a budget before the budget is given up."""
_FIRST_ROUNDS = 2
"""The same before it is used: one step may be slow by chance."""


def find_token_budget(
    prober: Prober,
    rows: RowsToTry,
    row_lengths: Lengths,
    known: Sequence[Sequence[int]] | None = None,
) -> BudgetReport:
    """Find the token budget on the run itself, which is afterwards as it was before. One trial confirms the
    rows by length that are ``known`` from an earlier part of this run."""
    settings, longest = prober.settings, int(row_lengths.max())
    require_no_longer(longest, int(row_lengths.argmax()), settings.probe_length)
    longest = settings.probe_length or longest
    worst = prober.worst_case(rows.data, rows.lengths, longest)
    log.info(f"Searching for the token budget: the longest row has {longest} tokens.")
    lengths = lengths_to_measure(row_lengths, longest)
    most_rows = rows.per_rank if settings.grows else rows.configured.rows
    largest = worst.of_length(longest).batch
    # A step has as many micro-batches as it takes.
    with prober.primed(lambda size: 2, largest, worst.nothing_fits) as (probe, _):
        to_size = InTokens(
            trial=lambda size, length: probe.trial(size, worst.of_length(length).batch),
            lengths=lengths,
            most_rows=most_rows,
            nothing_fits=worst.nothing_fits,
            about=prober.facts(lengths=lengths, most_rows=most_rows),
            known=known,
        )
        if settings.token_budget is True:
            found = to_size.find(prober.ranks, settings.cache)
        else:
            found = to_size.as_given(settings.token_budget)
        budget = found.size
        buckets = length_buckets(longest, int(row_lengths.min())) if prober.compiled else ()
        ignored = prober.step.objective.ignored
        by_tokens = ByTokens(budget, row_lengths, rows.data.tokenizer.pad_id, ignored, buckets)
        speeds = _speeds(prober, probe, rows, by_tokens)
        validation = prober.fit_validation(probe, rows, lambda length: budget.tokens // length)
    shares = padding_shares(by_tokens, rows.configured) if prober.ranks.is_zero else (0.0, 0.0)
    without, with_budget = map(Throughput, prober.ranks.from_rank_zero(shares), speeds)
    # A budget of the user's own is meant, a checkpoint's is kept, and a batch that grows needs one.
    is_ours = settings.token_budget is True and not known and not settings.grows
    # Without it, micro-batches of the longest rows may run out of memory.
    fits_without = rows.configured.micro_batch <= budget.rows(budget.longest)
    used = not (is_ours and fits_without and is_slower(*speeds))
    return BudgetReport(
        by_tokens,
        found.trials,
        without,
        with_budget,
        used,
        split=rows.configured,
        validation=validation,
    )


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
    best_without = best_with = 0.0
    for number in range(1, _ROUNDS + 1):
        one, other = without(), with_budget()
        if one is None or other is None:
            return one, other  # there is nothing to compare
        best_without, best_with = max(best_without, one), max(best_with, other)
        if number >= _FIRST_ROUNDS and not is_slower(best_without, best_with):
            break
    return best_without, best_with


def _speeds(
    prober: Prober, probe: Probe, rows: RowsToTry, by_tokens: ByTokens
) -> tuple[float | None, float | None]:
    """Tokens per second and rank in the first step, without the budget and with it; None if not measured.

    The same on all ranks, since a step takes as long as it takes the slowest.
    """
    split = rows.configured
    if prober.compiled or split.rows > rows.per_rank:
        return None, None  # most of what would be measured is compiling; or there is no full step
    tokens = int(by_tokens.row_lengths[rows.first_samples].sum()) / split.ranks

    def measured(what: str, micro_batches: MicroBatches) -> float | None:
        step = rows.first_step(prober.ranks, micro_batches, micro_batches.full_size(split))
        seconds = probe.timed(what, step)
        return tokens / seconds[0] if seconds else None

    return best_throughputs(
        lambda: measured("without a token budget", ByRows("none")),
        lambda: measured("with the token budget", by_tokens),
    )


def length_buckets(longest: int, shortest: int) -> list[int]:
    """Up to 8 lengths from the shortest to the longest, each the same share longer than the one before."""
    ratio = (longest / max(shortest, 1)) ** (1 / 7)
    return sorted({min(longest, -(-round(shortest * ratio**i) // 8) * 8) for i in range(8)})
