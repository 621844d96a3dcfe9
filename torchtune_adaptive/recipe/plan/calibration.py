"""The errors of predictions on this machine, to correct the next one.

A search that starts from a prediction ends with a trial. The ratio of its measured peaks to the predicted
ones is kept for the kind of device and of run, the libraries' versions, and the allocator's settings.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from torchtune_adaptive.common import Cache, cache_folder, libraries
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.fingerprint import allocator_facts


@dataclass(frozen=True)
class Calibration:
    """One trial compared with its prediction."""

    device: str
    """The device's own name."""
    capacity: int
    """Bytes that a process could get."""
    reserved_ratio: float
    """Measured peak of reserved memory / predicted peak."""
    allocated_ratio: float
    """Measured peak of allocated memory / predicted peak."""
    when: float
    """Seconds since 1970."""

    KEPT_IN: ClassVar[Literal["calibrations"]] = "calibrations"
    NAME: ClassVar[str] = "calibration"

    def is_plausible(self) -> bool:
        return 0.5 < self.reserved_ratio < 2

    @staticmethod
    def facts(asked: Asked) -> dict[str, Any]:
        """Facts that make a difference to it, besides those that ``Calibrations`` knows."""
        return {"allocator": allocator_facts()}

    def comparison(self) -> str:
        reserved, allocated = _off(self.reserved_ratio), _off(self.allocated_ratio)
        if reserved == allocated == "equal to":
            return "the measured peak was as predicted"
        off = f"{reserved} the prediction (reserved; allocated: {allocated} it)"
        return f"the measured peak was {off}"

    def text(self) -> str:
        day = time.strftime("%Y-%m-%d", time.localtime(self.when))
        return f"on this machine, {day}: {self.comparison()}; reserved memory is corrected by this"


@dataclass(frozen=True)
class SpeedCalibration:
    """Timed steps compared with their prediction."""

    device: str
    """The device's own name."""
    seconds_ratio: float
    """Measured seconds of a step / predicted seconds."""
    when: float
    """Seconds since 1970."""

    KEPT_IN: ClassVar[Literal["speeds"]] = "speeds"
    NAME: ClassVar[str] = "speed calibration"

    def is_plausible(self) -> bool:
        """Outside of these bounds, something else than the model was measured."""
        return 0.05 < self.seconds_ratio < 20

    @staticmethod
    def facts(asked: Asked) -> dict[str, Any]:
        """Facts that make a difference to it, besides those that ``Calibrations`` knows."""
        return {"dtype": str(asked["dtype"]), "quantised": asked.quantized}


Kept = TypeVar("Kept", Calibration, SpeedCalibration)


class Calibrations(Generic[Kept]):
    """The calibrations of this machine for one kind of run.

    Args:
        made: the kind of calibration: ``Calibration`` for memory, ``SpeedCalibration`` for speed.
        asked: what the run was asked for, with the folder where they are kept. The error of a prediction is
            different for compiled steps, packed rows and layers that are split, so each kind has its own.
        ranks: the number of ranks; only one or several makes a difference.
    """

    def __init__(self, made: type[Kept], asked: Asked, ranks: int) -> None:
        self._made: type[Kept] = made
        self._kept: Cache[dict[str, Any]] = Cache(
            cache_folder(asked.settings.cache, made.KEPT_IN), made.NAME, self._is_valid
        )
        self._kind = {
            "ranks": "many" if ranks > 1 else "one",
            "compile": bool(asked["compile"]),
            "packed": asked.packed(),
            "holders": asked.holders,
            "libraries": libraries(),
            **made.facts(asked),
        }

    def of(self, device: str) -> Kept | None:
        """The calibration for a kind of device."""
        kept = self._kept.get({**self._kind, "device": device})
        return self._made(**kept) if kept else None

    def newest(self) -> Kept | None:
        """The latest calibration, for whatever device."""
        found = [
            self._made(**kept)
            for facts, kept in self._kept.all()
            if facts == {**self._kind, "device": kept["device"]}
        ]
        return max(found, key=lambda one: one.when, default=None)

    def keep(self, calibration: Kept) -> None:
        if calibration.is_plausible():  # another would cause a warning each time it is read
            self._kept.put({**self._kind, "device": calibration.device}, asdict(calibration))

    def _is_valid(self, value: Any) -> bool:
        try:
            return self._made(**value).is_plausible()
        except TypeError:
            return False


def _off(ratio: float) -> str:
    """``1.20% above``, ``0.50% below``, ``equal to``."""
    off = f"{abs(ratio - 1):.2%}"
    return "equal to" if off == "0.00%" else f"{off} {'above' if ratio > 1 else 'below'}"
