"""Predictions for a run that is about to search, made in another process while the run sets up.

The process starts before the run loads its model. When the run knows the length of its rows and how much
memory there is, it asks. If there is no answer, the search continues without one and logs why.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any, ClassVar

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.core import Choice, Usage
from torchtune_adaptive.planner import Answer, Question, TracedRun, Worker, gpus
from torchtune_adaptive.recipe.plan.calibration import Calibration, Calibrations, SpeedCalibration
from torchtune_adaptive.recipe.plan.device import device_for, pace_for
from torchtune_adaptive.recipe.plan.query import planned_rank
from torchtune_adaptive.recipe.plan.ranking import ranked_choices
from torchtune_adaptive.recipe.plan.request import plan_request, require_traceable, row_length
from torchtune_adaptive.recipe.settings.asked import ACCUMULATION, Asked
from torchtune_adaptive.recipe.tracing.traces import Traces

log = logging.getLogger(__name__)

PATIENCE = 120.0
"""Seconds that an answer may take."""


class BackgroundPlanner:
    """Another process that predicts for a run: only until it fails or is late for the first time.

    An object of the class ``answers`` answers there, made with the other arguments.

    Raises:
        OSError: the process cannot be started.
    """

    INSTEAD: ClassVar[str]
    """What a run does without a prediction."""

    def __init__(self, answers: type, asked: Asked, ranks: int, *about: Any) -> None:
        self._worker, self._failed = Worker(answers, asked, ranks, *about), False

    @classmethod
    def begin(cls, asked: Asked, ranks: int, device: str) -> BackgroundPlanner | None:
        """Start the one that the run needs; None, and the reason in the log, if that is not possible.
        ``device`` is the device's name for itself."""
        planner = RankPlanner if asked.settings.use_fastest_configuration else PeakPlanner
        try:
            return planner(asked, ranks, device)
        except OSError as error:
            log.info(f"No prediction: {error}. {planner.INSTEAD}.")
            return None

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._worker.close()

    def _answer(self, question: object) -> Any:
        """The answer; None, and the reason in the log, if there is none, and none to later questions either:
        a late answer would be to an earlier one."""
        if self._failed:
            return None
        try:
            return self._worker.ask(question, PATIENCE)
        except NoPrediction as reason:
            self._failed = True
            log.info(f"No prediction: {str(reason).rstrip('.')}. {self.INSTEAD}.")
            return None


class PeakPlanner(BackgroundPlanner):
    """Predicts the largest micro-batch that fits, and learns from trials how wrong it is.

    Note [What a prediction may learn from]. The ratio of a measured peak to the predicted one corrects later
    predictions on this machine, so both must be of the same step:

    * At a size that fits. Where memory ran out, the peak is that of an unfinished step.
    * With one micro-batch in both, or several in both. Later micro-batches find the gradients of the first in
      memory, so the ratio would be of those gradients.
    * Predicted without the correction that is known already. From a corrected prediction the ratio would be
      nearly 1; it takes the place of the one before, so every second run would begin with no correction.
    """

    INSTEAD = "Searching without it"

    def __init__(self, asked: Asked, ranks: int, device: str) -> None:
        settings = asked.settings
        micro_batches = 2 if settings.keep_global_batch or settings.grow_past_memory else 1
        self._asked, self._ranks, self._name = asked, ranks, device
        self._accumulation = max(asked.accumulation, micro_batches)
        self._calibrations = Calibrations(Calibration, asked, ranks)
        self._learned = self._calibrations.of(device)
        self._about: Question | None = None
        self._logged: int | None = None
        asked = asked.resolved()
        asked.cfg[ACCUMULATION] = self._accumulation
        super().__init__(PeakAnswers, asked, ranks, gpus.is_before_ampere(device))

    def largest(self, row_length: int, capacity: int) -> int | None:
        """The largest micro-batch that should fit, with rows as long as in trials and so many bytes for one
        rank; None if there is no answer."""
        device, _ = device_for(self._asked, self._ranks, gpus.known(self._name), capacity)
        self._capacity = capacity
        self._about = Question(device, None, row_length, confirmed=True)
        if self._learned is not None:
            device = replace(device, correction=self._learned.reserved_ratio)
        found: Answer | None = self._answer(replace(self._about, device=device))
        if found is None:
            return None
        if found.largest != self._logged:
            log.info(f"Predicted largest micro-batch: {found.largest}.")
            if found.as_written:
                log.info(f"It is predicted as if nothing were compiled: {found.as_written}.")
        self._logged = found.largest
        return found.largest

    def learn_from(self, rows: int, measured: Usage, accumulation: int) -> None:
        """Correct later predictions, also those of later runs, by the largest peaks of all ranks that were
        measured at a size that fits, in a step with so many micro-batches (``accumulation``)."""
        if self._about is None or (accumulation > 1) != (self._accumulation > 1):
            return
        # The ceiling saves the search for the largest.
        question = replace(self._about, rows=rows, ceiling=rows, confirmed=False)
        found: Answer | None = self._answer(question)
        if found is None:
            return
        self._learned = Calibration(
            device=self._name,
            capacity=self._capacity,
            reserved_ratio=measured.peak_bytes / found.peak.reserved,
            allocated_ratio=measured.peak_allocated_bytes / found.peak.allocated,
            when=time.time(),
        )
        log.info(f"Micro-batch {rows}: {self._learned.comparison()}.")
        self._calibrations.keep(self._learned)


class RankPlanner(BackgroundPlanner):
    """Ranks choices of knobs as ``tune-adaptive plan --fastest`` does, and learns how long steps take."""

    INSTEAD = "Ranking by rules of thumb"

    def __init__(self, asked: Asked, ranks: int, device: str) -> None:
        self._device, self._calibrations = device, Calibrations(SpeedCalibration, asked, ranks)
        super().__init__(RankAnswers, asked.resolved(), ranks, device)

    def ranked(self, row_length: int, capacity: int) -> list[tuple[Choice, float]] | None:
        """All choices and the seconds of a step with each, the fastest first; None if there is no answer."""
        found: list[tuple[Choice, float]] | None = self._answer((row_length, capacity))
        return found

    def learn_from(self, measured: float, predicted: float) -> None:
        """Correct later predictions, also those of plans, by the seconds that a step took."""
        self._calibrations.keep(SpeedCalibration(self._device, measured / predicted, time.time()))


class PeakAnswers:
    """The other process's side: traces first, then says what rows take."""

    def __init__(self, asked: Asked, ranks: int, before_ampere: bool) -> None:
        from torchtune_adaptive.recipe.tracing.self_check import check_method

        require_traceable(asked)
        check_method(asked.settings.cache)
        rank = planned_rank(asked)
        self._traces = Traces(asked, ranks, rank, before_ampere=before_ampere)
        length, _ = row_length(asked)
        self._run = TracedRun(self._traces, length, any_length=True)
        self._traces.remember()

    def __call__(self, question: Question) -> Answer:
        answer = self._run.answer(question)
        self._traces.remember()
        return answer


class RankAnswers:
    """The other process's side where choices of knobs are ranked, for a row length and a capacity."""

    def __init__(self, asked: Asked, ranks: int, device: str) -> None:
        from torchtune_adaptive.recipe.tracing.self_check import check_method

        self._asked, self._ranks, self._device = asked, ranks, device
        check_method(asked.settings.cache)

    def __call__(self, question: tuple[int, int]) -> list[tuple[Choice, float]]:
        asked, ranks = self._asked, self._ranks
        length, capacity = question
        card = gpus.known(self._device)
        request = plan_request(asked.cfg, ranks, card, memory=capacity, length=length)
        pace, reasons = pace_for(asked, ranks, self._device)
        if pace is None:
            raise NoPrediction(*reasons)
        return ranked_choices(request.query(pace=pace), asked.settings.may_change)
