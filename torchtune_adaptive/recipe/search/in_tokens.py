"""Sizes in tokens: rows that fit, by their length, found by trials at several lengths."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from torchtune_adaptive.common import ConfigError, counted
from torchtune_adaptive.core import Budget, SizeTrial, strategies
from torchtune_adaptive.recipe.search.sizing import ToSize
from torchtune_adaptive.recipe.settings.adaptive import BLOCK

log = logging.getLogger(__name__)

TrialAt = Callable[[int, int], SizeTrial]
"""A function that tries a number of rows, of a length."""

_ESTIMATES_ARE_SHORT_BY = 0.03
"""The share of free memory that estimates leave: they miss by as much, and a failed trial is wasted."""


@dataclass(frozen=True)
class LengthTrial:
    """A trial, and the length of its rows."""

    COLUMNS: ClassVar = ("row length", *SizeTrial.COLUMNS)
    """The headings of ``cells``."""

    length: int
    trial: SizeTrial

    def cells(self) -> tuple[str, ...]:
        """The trial as a row of a table."""
        return (str(self.length), *self.trial.cells())

    def as_dict(self) -> dict[str, Any]:
        return {"length": self.length, **self.trial.as_dict()}


@dataclass(frozen=True)
class FoundBudget:
    """Rows that fit, by length, and the trials that found them."""

    size: Budget
    trials: Sequence[LengthTrial]


def budget_of(measured: Sequence[Sequence[int]]) -> Budget:
    """A budget, as it is saved."""
    return Budget(tuple((length, rows) for length, rows in measured))


def _is_budget(value: Any) -> bool:
    try:
        budget = budget_of(value)
    except (TypeError, ValueError):
        return False
    return all(type(number) is int for pair in budget.measured for number in pair)


@dataclass(frozen=True, kw_only=True)
class InTokens(ToSize[FoundBudget]):
    """What is sized in tokens: in rows of several lengths."""

    KEPT = "token budget", _is_budget

    trial: TrialAt
    lengths: Sequence[int]
    """The lengths to measure at, descending."""
    most_rows: int
    """The most rows that a micro-batch may have: those that a step may have on one rank."""

    def _to_keep(self, found: FoundBudget) -> Any:
        return found.size.measured

    def _searched(self) -> FoundBudget:
        budget, trials = find_budget(self.trial, self.lengths, self.most_rows)
        if budget is None:
            raise self.nothing_fits(trials[-1].trial)
        return FoundBudget(budget, trials)

    def as_given(self, size: int) -> FoundBudget:
        """The budget that the user gives, by one trial.

        Raises:
            ConfigError: it does not fit.
        """
        longest = self.lengths[0]
        if size < longest:
            raise ConfigError(
                f"{BLOCK}.token_budget",
                size,
                f"is less than the longest row ({longest} tokens)",
                f"Use {longest} or more, or cut rows with tokenizer.max_seq_len",
            )
        trial = try_at(self.trial, min(size // longest, self.most_rows), longest)
        if not (tried := trial.trial).fits:
            rows = f"{counted(tried.size, 'row')} of {longest} tokens"
            raise ConfigError(
                f"{BLOCK}.token_budget",
                size,
                f"does not fit: {tried.deciding.trouble} with {rows}",
                "Use less, or True to have it found",
            )
        return FoundBudget(Budget.of_tokens(size, longest), [trial])

    def _confirmed(self, earlier: Sequence[Sequence[int]]) -> FoundBudget | None:
        budget, longest = budget_of(earlier), self.lengths[0]
        if budget.longest != longest:
            return None
        log.info("A token budget was found before; verifying with one trial.")
        trial = try_at(self.trial, budget.rows(longest), longest)
        if not trial.trial.fits:
            log.info("It no longer fits; searching again.")
            return None
        if not self.known and self._has_room_for_another_row(trial.trial):
            # Whatever was short of memory then, e.g. because of another process, is not any more.
            log.info("There is room for more now; searching again.")
            return None
        return FoundBudget(budget, [trial])

    def _has_room_for_another_row(self, longest: SizeTrial) -> bool:
        """Whether one more row of the longest would fit even if all memory were that of rows."""
        rows, deciding = longest.size, longest.deciding
        fits = deciding.peak_bytes * (rows + 1) <= deciding.usable_bytes * rows
        return rows < self.most_rows and fits


def try_at(trial_at: TrialAt, rows: int, length: int) -> LengthTrial:
    """Try so many rows of a length, and log what came of it."""
    trial = trial_at(rows, length)
    log.info(f"{length} tokens a row: {trial.line()}")
    return LengthTrial(length, trial)


def lengths_to_measure(row_lengths: npt.ArrayLike, longest: int) -> list[int]:
    """The longest row that can be, then halves of it, down to the median of the data."""
    numbers = np.asarray(row_lengths)
    middle = int(np.partition(numbers, len(numbers) // 2)[len(numbers) // 2])
    lengths = [longest]
    while lengths[-1] // 2 >= max(middle, 2):
        lengths.append(lengths[-1] // 2)
    return lengths


def find_budget(
    trial_at: TrialAt, lengths: Sequence[int], most_rows: int
) -> tuple[Budget | None, list[LengthTrial]]:
    """How many rows of each length fit; None if not even one of the longest does.

    The longest rows come first: a search finds how many of them fit. At each shorter length the same number
    of tokens is known to fit and needs no trial (see ``Budget``). What fits beyond that is estimated from
    what was measured, and the estimate is tried once: if it fails, the known size stays. ``lengths`` are
    descending.
    """
    trials: list[LengthTrial] = []

    def tried(rows: int, length: int) -> SizeTrial:
        trials.append(try_at(trial_at, rows, length))
        return trials[-1].trial

    longest = lengths[0]
    found = strategies.find_largest(
        "extrapolate", range(1, most_rows + 1), lambda rows: tried(rows, longest)
    )
    if found.size is None:
        return None, trials
    measured = {longest: found.size}
    for length in lengths[1:]:
        rows = min(most_rows, measured[min(measured)] * min(measured) // length)
        measured[length] = rows
        estimate = min(most_rows, _estimate(trials, length))
        if rows < estimate and tried(estimate, length).fits:
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
