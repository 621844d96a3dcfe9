"""A prediction for a run that is about to search, made in another process while the run sets up.

The process traces while the run loads its model. When the run knows the length of its rows and how much
memory there is, it asks. If there is no answer, the search continues without one and logs why.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.core import Usage
from torchtune_adaptive.planner import TracedRun, Worker
from torchtune_adaptive.recipe.plan.calibration import Calibration, Calibrations
from torchtune_adaptive.recipe.plan.request import device_for, row_length
from torchtune_adaptive.recipe.settings.adaptive import AdaptiveSettings
from torchtune_adaptive.recipe.settings.checks import check
from torchtune_adaptive.recipe.settings.kinds import kind_of
from torchtune_adaptive.recipe.tracing.traces import Traces

log = logging.getLogger(__name__)

PATIENCE = 120.0
"""Seconds that an answer may take."""


@dataclass(frozen=True)
class PredictedPeak:
    """The memory that a number of rows should take."""

    rows: int
    reserved: int
    allocated: int


@dataclass(frozen=True)
class _Question:
    row_length: int
    capacity: int
    """Of one rank."""
    correction: float = 1.0
    rows: int | None = None
    """None asks for the largest number of rows that fits."""


class BackgroundPlanner:
    """What ``tune-adaptive plan`` would predict for a run.

    Args:
        cfg: the config of the run.
        settings: how it searches.
        ranks: how many there are.
        device: the device's name for itself.

    Raises:
        OSError: the process that traces cannot be started.
    """

    def __init__(
        self, cfg: DictConfig, settings: AdaptiveSettings, ranks: int, device: str
    ) -> None:
        self._device = device
        self._calibrations = Calibrations(settings.cache, cfg, ranks)
        self._learned = self._calibrations.of(device)
        self._about = _Question(0, 0)
        self._failure: NoPrediction | None = None
        self._logged: int | None = None
        micro_batches = 2 if settings.keep_global_batch or settings.grow_past_memory else 1
        self._accumulation = max(cfg.gradient_accumulation_steps, micro_batches)
        plain: Any = OmegaConf.to_container(cfg, resolve=True)
        plain["gradient_accumulation_steps"] = self._accumulation
        self._worker = Worker(_Planner, plain, ranks)

    @classmethod
    def begin(
        cls, cfg: DictConfig, settings: AdaptiveSettings, ranks: int, device: str
    ) -> BackgroundPlanner | None:
        """Start one; None, and the reason in the log, if that is not possible."""
        try:
            return cls(cfg, settings, ranks, device)
        except OSError as error:
            log.info(f"No prediction: {error}. Searching without it.")
            return None

    def largest(self, row_length: int, capacity: int) -> int | None:
        """The largest micro-batch that should fit; None if there is no answer.

        Args:
            row_length: the length of the rows in trials.
            capacity: of one rank.
        """
        self._about = _Question(row_length, capacity)
        correction = self._learned.reserved_ratio if self._learned else 1.0
        try:
            rows = self._ask(replace(self._about, correction=correction)).rows
        except NoPrediction as reason:
            log.info(f"No prediction: {str(reason).rstrip('.')}. Searching without it.")
            return None
        if rows != self._logged:
            log.info(f"Predicted largest micro-batch: {rows}.")
        self._logged = rows
        return rows

    def learn_from(self, rows: int, measured: Usage, accumulation: int) -> None:
        """Correct later predictions, also those of later runs, by what a size that fits took.

        Args:
            rows: the size.
            measured: the largest peaks of all ranks.
            accumulation: micro-batches in the step that was measured.
        """
        if (accumulation > 1) != (self._accumulation > 1):
            return  # the predicted step is a different one, with gradients of an earlier micro-batch
        try:
            predicted = self._ask(replace(self._about, rows=rows))
        except NoPrediction:
            return  # already logged
        self._learned = Calibration(
            device=self._device,
            capacity=self._about.capacity,
            reserved_ratio=measured.peak_bytes / predicted.reserved,
            allocated_ratio=measured.peak_allocated_bytes / predicted.allocated,
            when=time.time(),
        )
        log.info(f"Micro-batch {rows}: {self._learned.comparison()}.")
        self._calibrations.keep(self._learned)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._worker.close()

    def _ask(self, question: _Question) -> PredictedPeak:
        if self._failure is None:
            try:
                return self._worker.ask(question, PATIENCE)
            except NoPrediction as reason:
                self._failure = reason  # for good: a late answer would be to an earlier question
        raise self._failure


class _Planner:
    """The other process's side: traces first, then answers questions."""

    def __init__(self, cfg: dict[str, Any], ranks: int) -> None:
        from torchtune_adaptive.recipe.tracing.self_check import check_method

        self._cfg, self._ranks = OmegaConf.create(cfg), ranks
        self._settings = check(self._cfg, kind_of(self._cfg))
        check_method(self._settings.cache)
        self._traces = Traces(self._cfg, ranks, 0, self._settings.cache)
        length, _ = row_length(self._cfg, self._settings)
        self._run = TracedRun(self._traces, length, any_length=True)
        self._traces.remember()

    def __call__(self, question: _Question) -> PredictedPeak:
        length, rows = question.row_length, question.rows
        device, _ = device_for(self._cfg, self._settings, self._ranks, memory=question.capacity)
        if rows is None:
            corrected = replace(device, correction=question.correction)
            rows = self._run.confirmed_largest(length, corrected)
        peak = self._run.peak(max(rows, 1), length, device)
        self._traces.remember()
        return PredictedPeak(rows, peak.reserved, peak.allocated)
