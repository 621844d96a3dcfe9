"""The token budget of a run: found by trials at several row lengths, kept by every micro-batch.

The longest rows come first: how many of them fit is searched for. Each shorter length may have as many
tokens without a trial (see ``packing.Budget``). What fits beyond that is estimated from what has been
measured, and the estimate is tried once: if it fails, what needed no trial stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.packing import Budget, pack
from torchtune_adaptive.probe import Probe, SizeTrial
from torchtune_adaptive.report import trial_line
from torchtune_adaptive.sampler import Portion
from torchtune_adaptive.search import search

log = logging.getLogger(__name__)

_ESTIMATES_ARE_SHORT_BY = 0.03
"""Of the room that is left: estimates miss by as much, and a trial that fails is worth nothing here."""


@dataclass(frozen=True)
class LengthTrial:
    """A trial, and the length of its rows."""

    length: int
    trial: SizeTrial


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


class TokenPacker:
    """Makes the micro-batches of a step under a budget; what a ``Loader`` asks.

    Args:
        budget: of a micro-batch.
        row_lengths: of every sample.
        padding_id: what rows are padded with.
        ignored: the label that is not trained on.
        buckets: lengths that batches are padded to, ascending, so that a compiled model sees few shapes;
            without any, batches are as long as their longest row.
    """

    def __init__(
        self,
        budget: Budget,
        row_lengths: Sequence[int],
        padding_id: int,
        ignored: int,
        buckets: Sequence[int] = (),
    ) -> None:
        self.budget = budget
        self.row_lengths = row_lengths
        self._lengths = [_up_to(buckets, length) for length in row_lengths]
        self._padding_id = padding_id
        self._ignored = ignored
        self._buckets = buckets

    @property
    def largest(self) -> int:
        return self.budget.tokens

    def padding_share(self, taken: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> float:
        """Of what was computed in some micro-batches, given their samples and shapes."""
        computed = sum(rows * length for _, (rows, length) in taken)
        tokens = sum(self.row_lengths[sample] for samples, _ in taken for sample in samples)
        return 1 - tokens / computed

    def state(self) -> list[list[int]]:
        return [list(each) for each in self.budget.measured]

    def portions(self, step: list[int], size: int, rank: int, ranks: int) -> list[Portion]:
        """``size`` is the budget's tokens, or as much less as rows are to be fewer."""
        budget = self.budget.shrunk(-(-self.budget.tokens // size))
        lengths = [self._lengths[sample] for sample in step]
        parts = pack(lengths, budget, ranks)[rank]
        shortest = step[min(range(len(step)), key=lengths.__getitem__)]
        return [
            Portion([step[i] for i in part]) if part else Portion([shortest], weightless=True)
            for part in parts
        ]

    def finish(self, portion: Portion, batch: dict[str, Any]) -> None:
        if portion.weightless:
            batch["labels"] = torch.full_like(batch["labels"], self._ignored)
        length = batch["tokens"].shape[-1]
        missing = _up_to(self._buckets, length) - length
        if missing > 0:
            batch["tokens"] = F.pad(batch["tokens"], (0, missing), value=self._padding_id)
            batch["labels"] = F.pad(batch["labels"], (0, missing), value=self._ignored)

    def sizes(self) -> list[int]:
        """What ``portions`` may be asked for: the whole budget, a half, and so on to single rows."""
        most = max(rows for _, rows in self.budget.measured)
        return [max(1, self.budget.tokens >> halvings) for halvings in range(most.bit_length())]


def length_buckets(longest: int, shortest: int, count: int = 8) -> list[int]:
    """A few lengths from the shortest to the longest, each the same share longer than the one before."""
    ratio = (longest / max(shortest, 1)) ** (1 / max(count - 1, 1))
    return sorted({min(longest, -(-round(shortest * ratio**i) // 8) * 8) for i in range(count)})


def _up_to(buckets: Sequence[int], length: int) -> int:
    return next((bucket for bucket in buckets if bucket >= length), length)
