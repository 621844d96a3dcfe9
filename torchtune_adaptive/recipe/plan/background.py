"""Predictions for a run that is about to search, made in another process while the run sets up.

The process starts before the run loads its model. When the run knows the length of its rows and how much
memory there is, it asks. If there is no answer, the search continues without one and logs why.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.core import Choice, Usage
from torchtune_adaptive.planner import TracedRun, Worker
from torchtune_adaptive.recipe.plan.calibration import Calibration, Calibrations, SpeedCalibration
from torchtune_adaptive.recipe.plan.pace import pace_for
from torchtune_adaptive.recipe.plan.predict import planned_rank
from torchtune_adaptive.recipe.plan.ranking import rank_candidates
from torchtune_adaptive.recipe.plan.request import (
    device_for,
    plan_request,
    require_traceable,
    row_length,
)
from torchtune_adaptive.recipe.settings.adaptive import AdaptiveSettings
from torchtune_adaptive.recipe.settings.asked import ACCUMULATION, Asked
from torchtune_adaptive.recipe.settings.checks import check
from torchtune_adaptive.recipe.settings.knob_table import configured_choice
from torchtune_adaptive.recipe.tracing.traces import Traces

log = logging.getLogger(__name__)

PATIENCE = 120.0
"""Seconds that an answer may take."""


@dataclass(frozen=True)
class PeakQuestion:
    """A question: how much memory do so many rows take?"""

    row_length: int
    capacity: int
    """Bytes that one rank can get."""
    correction: float = 1.0
    rows: int | None = None
    """Number of rows; None asks for the largest that fits."""


@dataclass(frozen=True)
class PredictedPeak:
    """The answer: the memory that a number of rows should take."""

    rows: int
    reserved: int
    allocated: int
    as_written: str = ""
    """The reason why something that is compiled was predicted as it is written; empty if nothing was."""


class BackgroundPlanner:
    """The predictions of ``tune-adaptive plan`` for a run: the largest micro-batch that fits; or, where the
    run chooses its fastest configuration, the ranking of ``--fastest``.

    Args:
        asked: what the run was asked for.
        ranks: the number of ranks.
        device: the device's name for itself.

    Raises:
        OSError: the process that predicts cannot be started.
    """

    def __init__(self, asked: Asked, ranks: int, device: str) -> None:
        self._device, settings = device, asked.settings
        self._peaks = Calibrations(Calibration, asked, ranks)
        self._speeds = Calibrations(SpeedCalibration, asked, ranks)
        self._about = PeakQuestion(0, 0)
        self._failed = False
        self._logged: int | None = None
        self._instead = _instead(settings)
        micro_batches = 2 if settings.keep_global_batch or settings.grow_past_memory else 1
        self._accumulation = max(asked.accumulation, micro_batches)
        asked = asked.resolved()
        if settings.use_fastest_configuration:
            self._worker = Worker(_Ranker, asked, ranks, device)
        else:
            self._learned = self._peaks.of(device)
            asked.cfg[ACCUMULATION] = self._accumulation
            self._worker = Worker(_Planner, asked, ranks)

    @classmethod
    def begin(cls, asked: Asked, ranks: int, device: str) -> BackgroundPlanner | None:
        """Start one; None, and the reason in the log, if that is not possible."""
        try:
            return cls(asked, ranks, device)
        except OSError as error:
            log.info(f"No prediction: {error}. {_instead(asked.settings)}.")
            return None

    def largest(self, row_length: int, capacity: int) -> int | None:
        """The largest micro-batch that should fit, with rows as long as in trials and so many bytes for one
        rank; None if there is no answer."""
        self._about = PeakQuestion(row_length, capacity)
        correction = self._learned.reserved_ratio if self._learned else 1.0
        found = self._answer(replace(self._about, correction=correction))
        if found is None:
            return None
        if found.rows != self._logged:
            log.info(f"Predicted largest micro-batch: {found.rows}.")
            if found.as_written:
                log.info(f"It is predicted as if nothing were compiled: {found.as_written}.")
        self._logged = found.rows
        return int(found.rows)

    def learn_from(self, rows: int, measured: Usage, accumulation: int) -> None:
        """Correct later predictions, also those of later runs, by the largest peaks of all ranks that were
        measured at a size that fits, in a step with so many micro-batches (``accumulation``)."""
        if (accumulation > 1) != (self._accumulation > 1):
            return  # the predicted step is a different one, with gradients of an earlier micro-batch
        predicted = self._answer(replace(self._about, rows=rows))
        if predicted is None:
            return
        self._learned = Calibration(
            device=self._device,
            capacity=self._about.capacity,
            reserved_ratio=measured.peak_bytes / predicted.reserved,
            allocated_ratio=measured.peak_allocated_bytes / predicted.allocated,
            when=time.time(),
        )
        log.info(f"Micro-batch {rows}: {self._learned.comparison()}.")
        self._peaks.keep(self._learned)

    def ranked(self, row_length: int, capacity: int) -> list[tuple[Choice, float]] | None:
        """All choices and the seconds of a step with each, the fastest first; None if there is no answer."""
        found: list[tuple[Choice, float]] | None = self._answer((row_length, capacity))
        return found

    def learn_seconds(self, measured: float, predicted: float) -> None:
        """Correct later predictions, also those of plans, by the seconds that a step took."""
        self._speeds.keep(SpeedCalibration(self._device, measured / predicted, time.time()))

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._worker.close()

    def _answer(self, question: PeakQuestion | tuple[int, int]) -> Any:
        """The answer; None, and the reason in the log, if there is none, and none to later questions either:
        a late answer would be to an earlier one."""
        if self._failed:
            return None
        try:
            return self._worker.ask(question, PATIENCE)
        except NoPrediction as reason:
            self._failed = True
            log.info(f"No prediction: {str(reason).rstrip('.')}. {self._instead}.")
            return None


def _instead(settings: AdaptiveSettings) -> str:
    """The words for what a run does without a prediction."""
    fastest = settings.use_fastest_configuration
    return "Ranking by rules of thumb" if fastest else "Searching without it"


class _Planner:
    """The other process's side: traces first, then says what rows take."""

    def __init__(self, asked: Asked, ranks: int) -> None:
        from torchtune_adaptive.recipe.tracing.self_check import check_method

        self._asked, self._ranks = check(asked.cfg, asked.kind), ranks
        require_traceable(asked)
        check_method(asked.settings.cache)
        self._traces = Traces(asked, ranks, planned_rank(asked), asked.settings.cache)
        length, _ = row_length(asked)
        self._run = TracedRun(self._traces, length, any_length=True)
        self._traces.remember()

    def __call__(self, question: PeakQuestion) -> PredictedPeak:
        length, rows = question.row_length, question.rows
        device, _ = device_for(self._asked, self._ranks, memory=question.capacity)
        if rows is None:
            corrected = replace(device, correction=question.correction)
            rows = self._run.confirmed_largest(length, corrected)
        peak = self._run.peak(max(rows, 1), length, device)
        self._traces.remember()
        return PredictedPeak(rows, peak.reserved, peak.allocated, self._traces.as_written)


class _Ranker:
    """The other process's side where choices of knobs are ranked, for a row length and a capacity."""

    def __init__(self, asked: Asked, ranks: int, device: str) -> None:
        from torchtune_adaptive.recipe.tracing.self_check import check_method

        self._asked, self._ranks, self._device = asked, ranks, device
        check_method(asked.settings.cache)

    def __call__(self, question: tuple[int, int]) -> list[tuple[Choice, float]]:
        asked, ranks = self._asked, self._ranks
        length, capacity = question
        request = plan_request(asked.cfg, ranks, memory=capacity, length=length)
        pace, reasons = pace_for(asked, ranks, self._device)
        if pace is None:
            raise NoPrediction(*reasons)
        found = rank_candidates(request.query(pace=pace), asked.settings.may_change)
        return [(configured_choice(one.asked, ranks), one.seconds) for one in found]
