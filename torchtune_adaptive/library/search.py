"""Find the largest micro-batch that fits, by trying."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, get_args

from torchtune_adaptive.common import UsageError, announce, arguments, counted
from torchtune_adaptive.core import Probe, Rounding, SizeTrial, StepDone, candidates, strategies
from torchtune_adaptive.library import checks
from torchtune_adaptive.library.forward_only import ForwardOnly
from torchtune_adaptive.library.step import AdaptiveStep
from torchtune_adaptive.library.summed_loss import SummedLoss

log = logging.getLogger(__name__)

_REMEDY = (
    "Shorten the rows, use activation checkpointing or more ranks, or allow more memory (memory_limit, "
    "headroom)."
)
"""Advice where not even one row fits."""
_JUDGED_FROM = 4
"""Rows from which on a mean is told from a sum."""


class BatchSize(int):
    """The largest micro-batch that fits: a number of rows, which knows how it was found."""

    status: strategies.Status
    """Why the search ended."""
    trials: tuple[SizeTrial, ...]
    """Every size that was tried, with the peak of each rank."""

    @property
    def why(self) -> str:
        """Why it is not larger."""
        larger = [trial for trial in self.trials if trial.size > self]
        if not larger:
            return "no larger one is allowed"
        next_one = min(larger, key=lambda trial: trial.size)
        of_many = f" on rank {next_one.deciding_rank}" if len(next_one.reports) > 1 else ""
        return f"{counted(next_one.size, 'row')}: {next_one.deciding.trouble}{of_many}"


def find_batch_size(
    step: AdaptiveStep,
    worst_case: Callable[[int], Any],
    *,
    phase: ForwardOnly | None = None,
    ceiling: int = 1 << 14,
    accumulation: int = 1,
    rounding: Rounding = "power_of_two",
    search: strategies.Strategy = "extrapolate",
    headroom: float = 0.05,
) -> BatchSize:
    """Find the largest micro-batch that fits on every rank, and leave no trace.

    Each trial takes the whole step on ``worst_case(rows)``: forward, backward, clipping and the optimizer.
    Afterward, parameters, buffers, optimizer state and random numbers are what they were, bit for bit.

    Args:
        step: the step that training will take.
        worst_case: function that makes a micro-batch of so many rows on the host, each as long as the data
            can make it.
        phase: what to find the size of in place of training: what ``step.forward_only`` made. The optimizer's
            state is in memory meanwhile.
        ceiling: the largest size to try; no more than there are rows in a step.
        accumulation: micro-batches in a step, or the most there may be; from two on, trials have gradients in
            memory.
        rounding: sizes that may be found: ``power_of_two``, ``divisor`` (of the ceiling), or ``none``.
        search: ``extrapolate``, ``bisect`` or ``halve``; they find the same.
        headroom: the share of the capacity that must stay free.

    Raises:
        NothingFits: not even one row.
        UsageError: an argument is not valid, ``worst_case`` makes too few rows, ``forward`` returns a mean,
            or there is no limit to find.
    """
    if not isinstance(step, AdaptiveStep):
        raise UsageError(f"step: a {type(step).__name__} is not an AdaptiveStep.")
    arguments.function("worst_case", worst_case)
    if phase is not None and (
        not isinstance(phase, ForwardOnly) or phase.step is not step.train_step
    ):
        raise UsageError("phase: pass what forward_only of this step made.")
    ceiling = arguments.whole("ceiling", ceiling)
    accumulation = arguments.whole("accumulation", accumulation)
    headroom = arguments.share("headroom", headroom)
    arguments.one_of("rounding", rounding, get_args(Rounding))
    arguments.one_of("search", search, get_args(strategies.Strategy))
    train_step = step.train_step
    if not train_step.memory.measured:
        raise UsageError(
            "memory_limit: a CPU has no memory of its own that a search could find the limit of. Pass "
            "AdaptiveStep(..., memory_limit='1GiB'), say."
        )
    worst = CheckedBatch(worst_case)
    of_phase = CheckedBatch(phase.worst_case) if phase is not None and phase.worst_case else worst
    objective = step.objective
    objective.begins = objective.equal_rows = True
    probe = Probe(
        step=train_step,
        accumulation=lambda size: accumulation,
        headroom=headroom,
        entering=log.debug,
        observe=_NotAMean(objective),
    )

    def trial(size: int) -> SizeTrial:
        if phase is None:
            tried = probe.trial(size, worst)
        else:
            tried = probe.trial_of(phase.phase, size, (of_phase(size), size))
        # The line says which rank had the least room.
        announce(log, tried.line(), rank_zero=step.ranks.is_zero)
        return tried

    try:
        with probe:
            first = probe.prime(worst)
            if not first.fits:
                raise first.nothing_fits("row", _REMEDY)
            found = strategies.find_largest(search, candidates(rounding, ceiling, ceiling), trial)
    finally:
        step.restore()
    if found.size is None:
        raise found.trials[-1].nothing_fits("row", _REMEDY)
    size = BatchSize(found.size)
    size.status, size.trials = found.status, found.trials
    of = f" of {phase.phase.name}" if phase is not None else ""
    announce(log, f"micro-batch{of} {size}: {found.status.value}", rank_zero=step.ranks.is_zero)
    return size


class CheckedBatch:
    """The user's function, checked: a micro-batch of twice the rows is twice as large.

    Or one of its tensors is: where rows are strung together, their ends are one number more than rows.
    """

    def __init__(self, batch: Callable[[int], Any]) -> None:
        self._batch = batch
        self._one: list[int] = []

    def __call__(self, rows: int) -> Any:
        made = self._batch(rows)
        found = checks.elements(made)
        if not self._one:
            self._one = found if rows == 1 else checks.elements(self._batch(1))
        if not sum(self._one):
            raise UsageError(
                f"worst_case: worst_case({rows}) has no tensors, so its rows cannot be counted."
            )
        each = zip(found, self._one, strict=False)
        grows = len(found) == len(self._one) and any(n >= rows * one > 0 for n, one in each)
        if not grows and sum(found) < rows * sum(self._one):
            raise UsageError(
                f"worst_case: worst_case({rows}) has {sum(found)} numbers in its tensors and worst_case(1) "
                f"has {sum(self._one)}, so it has too few rows. Repeat or generate rows, so that there are "
                f"{rows}, all of full length."
            )
        return made


class _NotAMean:
    """Checks that the loss of many rows is larger than that of one, as a sum is and a mean is not.

    A loss that may be negative, such as that of a policy, is not judged: its terms cancel.
    """

    def __init__(self, objective: SummedLoss) -> None:
        self._objective = objective
        self._one = 0.0

    def __call__(self, rows: int, outcome: StepDone) -> None:
        if self._objective.shares:
            return
        if rows == 1:
            self._one = outcome.loss
        # Divided by its weight, a sum gives the same mean for any number of rows, and a mean a fraction.
        elif (
            self._one > 0 and rows >= _JUDGED_FROM and 2 / 3 < outcome.loss * rows / self._one < 1.5
        ):
            raise UsageError(
                f"forward: the loss of {rows} rows is as large as that of one, so it is a mean. Return the "
                "sum over all terms, for example with reduction='sum', and the number of terms."
            )
