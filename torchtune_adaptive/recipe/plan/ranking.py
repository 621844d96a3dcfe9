"""A ranking of memory knobs by predicted speed, for a run that is about to choose among them.

Made in another process, which starts while the run sets up. Without an answer, the run chooses without one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.core import Choice
from torchtune_adaptive.planner import Worker
from torchtune_adaptive.recipe.plan.background import PATIENCE
from torchtune_adaptive.recipe.plan.calibration import SpeedCalibrations
from torchtune_adaptive.recipe.plan.candidates import rank_candidates
from torchtune_adaptive.recipe.plan.pace import pace_for
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.settings.adaptive import AdaptiveSettings
from torchtune_adaptive.recipe.settings.knob_table import configured_choice

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Question:
    row_length: int
    capacity: int


class BackgroundRanking:
    """What ``tune-adaptive plan --fastest`` would predict for a run.

    Args:
        cfg: the config of the run.
        settings: its adaptive settings.
        ranks: how many there are.
        device: the device's name for itself.

    Raises:
        OSError: the process that predicts cannot be started.
    """

    def __init__(
        self, cfg: DictConfig, settings: AdaptiveSettings, ranks: int, device: str
    ) -> None:
        self._device = device
        self._calibrations = SpeedCalibrations(settings.cache, cfg, ranks)
        plain = OmegaConf.to_container(cfg, resolve=True)
        self._worker = Worker(_Ranker, plain, settings, ranks, device)

    @classmethod
    def begin(
        cls, cfg: DictConfig, settings: AdaptiveSettings, ranks: int, device: str
    ) -> BackgroundRanking | None:
        """Start one; None, and the reason in the log, if that is not possible."""
        try:
            return cls(cfg, settings, ranks, device)
        except OSError as error:
            log.info(f"No prediction: {error}. Ranking by rules of thumb.")
            return None

    def ranked(self, row_length: int, capacity: int) -> list[tuple[Choice, float]] | None:
        """All choices and the seconds that a step should take, the fastest first; None if there is no answer.

        Args:
            row_length: the length of the rows in trials.
            capacity: of one rank.
        """
        try:
            found: list[tuple[Choice, float]] = self._worker.ask(
                _Question(row_length, capacity), PATIENCE
            )
        except NoPrediction as reason:
            log.info(f"No prediction: {str(reason).rstrip('.')}. Ranking by rules of thumb.")
            return None
        return found

    def learn_from(self, measured: float, predicted: float) -> None:
        """Correct later predictions, also those of plans, by the seconds that a step took."""
        self._calibrations.keep(self._device, measured, predicted)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._worker.close()


class _Ranker:
    """The other process's side."""

    def __init__(
        self, cfg: dict[str, Any], settings: AdaptiveSettings, ranks: int, device: str
    ) -> None:
        from torchtune_adaptive.recipe.tracing.self_check import check_method

        self._cfg, self._settings = OmegaConf.create(cfg), settings
        self._ranks, self._device = ranks, device
        check_method(settings.cache)

    def __call__(self, question: _Question) -> list[tuple[Choice, float]]:
        cfg, settings, ranks = self._cfg, self._settings, self._ranks
        request = plan_request(cfg, ranks, memory=question.capacity, length=question.row_length)
        pace, reasons = pace_for(cfg, settings, ranks, self._device)
        if pace is None:
            raise NoPrediction(*reasons)
        found = rank_candidates(request.query(pace=pace), settings.may_change)
        return [(configured_choice(OmegaConf.create(one.cfg), ranks), one.seconds) for one in found]
