"""How far predictions were off on this machine, to correct the next one.

A search that starts from a prediction ends with a trial. The ratio of its measured peaks to the predicted
ones is kept for the kind of device and of run, the libraries' versions, and the allocator's settings.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.common import Cache, cache_folder, libraries
from torchtune_adaptive.recipe.settings.fingerprint import allocator_facts
from torchtune_adaptive.recipe.settings.kinds import is_packed, is_quantised


@dataclass(frozen=True)
class Calibration:
    """One trial compared with its prediction."""

    device: str
    """The device's name for itself."""
    capacity: int
    """Bytes that a process could get."""
    reserved_ratio: float
    """Measured peak of reserved memory / predicted peak."""
    allocated_ratio: float
    """The same for allocated memory."""
    when: float
    """Seconds since 1970."""

    def comparison(self) -> str:
        reserved, allocated = _off(self.reserved_ratio), _off(self.allocated_ratio)
        if reserved == allocated == "equal to":
            return "the measured peak was as predicted"
        return (
            f"the measured peak was {reserved} the prediction (reserved; allocated: {allocated} it)"
        )

    def text(self) -> str:
        day = time.strftime("%Y-%m-%d", time.localtime(self.when))
        return f"on this machine, {day}: {self.comparison()}; reserved memory is corrected by this"


def _off(ratio: float) -> str:
    """``1.20% above``, ``0.50% below``, ``equal to``."""
    text = f"{abs(ratio - 1):.2%}"
    if text == "0.00%":
        return "equal to"
    return f"{text} {'above' if ratio > 1 else 'below'}"


class Calibrations:
    """The calibrations of this machine for one kind of run.

    Args:
        cache: the run's setting: where they are kept.
        cfg: the config of the run. The error of a prediction is different for compiled steps and packed rows,
            so each kind has its own calibration.
        ranks: the number of ranks; only one or several makes a difference.
    """

    def __init__(self, cache: bool | str, cfg: DictConfig, ranks: int) -> None:
        self._kept: Cache[dict[str, Any]] = Cache(
            cache_folder(cache, "calibrations"), "calibration", _is_calibration
        )
        self._kind = {**_kind_of_run(cfg, ranks), "allocator": allocator_facts()}

    def of(self, device: str) -> Calibration | None:
        """The calibration for a kind of device."""
        kept = self._kept.get({**self._kind, "device": device})
        return Calibration(**kept) if kept else None

    def newest(self) -> Calibration | None:
        """The latest calibration, for whatever device."""
        found = [
            Calibration(**kept)
            for facts, kept in self._kept.all()
            if facts == {**self._kind, "device": kept["device"]}
        ]
        return max(found, key=lambda one: one.when, default=None)

    def keep(self, calibration: Calibration) -> None:
        value = asdict(calibration)
        if _is_calibration(value):  # an invalid one would cause a warning each time it is read
            self._kept.put({**self._kind, "device": calibration.device}, value)


@dataclass(frozen=True)
class SpeedCalibration:
    """Timed steps compared with their prediction."""

    device: str
    """The device's name for itself."""
    seconds_ratio: float
    """Measured / predicted seconds of a step."""
    when: float
    """Seconds since 1970."""


class SpeedCalibrations:
    """How far predicted speeds were off on this machine, for one kind of run.

    Args:
        cache: the run's setting: where they are kept.
        cfg: the config of the run.
        ranks: the number of ranks; only one or several makes a difference.
    """

    def __init__(self, cache: bool | str, cfg: DictConfig, ranks: int) -> None:
        self._kept: Cache[dict[str, Any]] = Cache(
            cache_folder(cache, "speeds"), "speed calibration", _is_speed_calibration
        )
        self._kind = {
            **_kind_of_run(cfg, ranks),
            "dtype": str(cfg.dtype),
            "quantised": is_quantised(cfg),
        }

    def of(self, device: str) -> SpeedCalibration | None:
        """The calibration for a kind of device."""
        kept = self._kept.get({**self._kind, "device": device})
        return SpeedCalibration(**kept) if kept else None

    def keep(self, device: str, measured: float, predicted: float) -> None:
        """Note what a step took, and what it should have taken, in seconds."""
        value = asdict(SpeedCalibration(device, measured / predicted, time.time()))
        if _is_speed_calibration(value):
            self._kept.put({**self._kind, "device": device}, value)


def _kind_of_run(cfg: DictConfig, ranks: int) -> dict[str, Any]:
    return {
        "ranks": "many" if ranks > 1 else "one",
        "compile": bool(cfg.get("compile", False)),
        "packed": is_packed(cfg),
        "libraries": libraries(),
    }


def _is_speed_calibration(value: Any) -> bool:
    """A ratio outside of these bounds says that something else than the model was measured."""
    try:
        return 0.05 < SpeedCalibration(**value).seconds_ratio < 20
    except TypeError:
        return False


def _is_calibration(value: Any) -> bool:
    try:
        return 0.5 < Calibration(**value).reserved_ratio < 2
    except TypeError:
        return False
