"""How far predictions were off on this machine, so that the next one is nearer.

A search that began with a prediction ends with a trial: what it took, by what was predicted for it, is kept
for the kind of device and of run, the libraries, and the allocator's settings.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.cache import Cache, cache_folder, libraries
from torchtune_adaptive.settings.fingerprint import allocator_facts
from torchtune_adaptive.settings.kinds import is_packed


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
    """Those of this machine for runs of a kind.

    Args:
        cache: the run's setting: where they are kept.
        cfg: of the run. Compiled steps and packed rows are predicted in another way than they run, so what
            is learnt of them says nothing about others.
        ranks: one or more.
    """

    def __init__(self, cache: bool | str, cfg: DictConfig, ranks: int) -> None:
        self._kept: Cache[dict[str, Any]] = Cache(
            cache_folder(cache, "calibration"), "calibration", _is_one
        )
        self._kind = {
            "ranks": "many" if ranks > 1 else "one",
            "compile": bool(cfg.get("compile", False)),
            "packed": is_packed(cfg),
            "libraries": libraries(),
            "allocator": allocator_facts(),
        }

    def of(self, device: str) -> Calibration | None:
        """The one for a kind of device."""
        kept = self._kept.get({**self._kind, "device": device})
        return Calibration(**kept) if kept else None

    def newest(self) -> Calibration | None:
        """The one that was measured last, on whatever device that was."""
        found = [
            Calibration(**kept)
            for facts, kept in self._kept.all()
            if facts == {**self._kind, "device": kept["device"]}
        ]
        return max(found, key=lambda one: one.when, default=None)

    def keep(self, calibration: Calibration) -> None:
        value = asdict(calibration)
        if _is_one(value):  # or it would only be refused, with a warning, each time it is read
            self._kept.put({**self._kind, "device": calibration.device}, value)


def _is_one(value: Any) -> bool:
    try:
        return 0.5 < Calibration(**value).reserved < 2
    except TypeError:
        return False
