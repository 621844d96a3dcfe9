"""How far predictions were off on this machine, so that the next one is nearer.

A search that began with a prediction ends with a trial: what it took, by what was predicted for it, is kept
for the kind of device, one rank or many, the libraries, and the allocator's settings.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from torchtune_adaptive.remembered import Remembered, folder_for, libraries
from torchtune_adaptive.result_cache import allocator_facts


@dataclass(frozen=True)
class Calibration:
    """What one trial has shown."""

    device: str
    """What the device calls itself."""
    capacity: int
    """Bytes that a process could get."""
    reserved: float
    """Peak as measured, by peak as predicted."""
    allocated: float
    """The same of what tensors held."""
    when: float
    """Seconds since 1970."""

    def text(self) -> str:
        day = time.strftime("%Y-%m-%d", time.localtime(self.when))
        return (
            f"measured here on {day}: peaks were {self.reserved - 1:+.2%} (reserved) and "
            f"{self.allocated - 1:+.2%} (allocated) off; predictions of reserved memory are corrected"
        )


class Calibrations:
    """Those of this machine, where the run's setting keeps them."""

    def __init__(self, cache: bool | str) -> None:
        self._kept: Remembered[dict[str, Any]] = Remembered(
            folder_for(cache, "calibration"), "calibration", _is_one
        )

    def of(self, device: str, ranks: int) -> Calibration | None:
        """The one for a kind of device."""
        kept = self._kept.get(_facts(device, ranks))
        return Calibration(**kept) if kept else None

    def newest(self, ranks: int) -> Calibration | None:
        """The one that was measured last, on whatever device that was."""
        found = [
            Calibration(**kept)
            for facts, kept in self._kept.all()
            if facts == _facts(kept["device"], ranks)
        ]
        return max(found, key=lambda one: one.when, default=None)

    def keep(self, calibration: Calibration, ranks: int) -> None:
        self._kept.put(_facts(calibration.device, ranks), asdict(calibration))


def _facts(device: str, ranks: int) -> dict[str, Any]:
    return {
        "device": device,
        "ranks": "many" if ranks > 1 else "one",
        "libraries": libraries(),
        "allocator": allocator_facts(),
    }


def _is_one(value: Any) -> bool:
    try:
        return 0.5 < Calibration(**value).reserved < 2
    except TypeError:
        return False
