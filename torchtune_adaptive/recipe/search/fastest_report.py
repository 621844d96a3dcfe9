"""What choosing the fastest configuration reports: what was tried, what changes, what to paste."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.common import bytes_of
from torchtune_adaptive.core import Choice, SizeTrial, Split
from torchtune_adaptive.recipe.settings.knob_table import changes, overrides, with_choice

JSON_NAME = "fastest_configuration.json"


@dataclass(frozen=True)
class TimedChoice:
    """A choice, and how long its steps should take and took."""

    choice: Choice
    predicted: float | None
    seconds: tuple[float, ...]

    @property
    def measured(self) -> float | None:
        """Seconds of a step; None if it was not timed to the end."""
        return median(self.seconds) if self.seconds else None


@dataclass(frozen=True)
class FastestReport:
    """The configuration that was chosen, and why."""

    cfg: DictConfig
    ranks: int
    own: Choice
    chosen: Choice
    split: Split
    timed: Sequence[TimedChoice]
    """The config's own values first, if they fit."""
    tried: Mapping[Choice, SizeTrial]
    tokens: int
    """In a step that was timed, over all ranks."""
    row_length: int
    row_source: str
    device: str
    headroom: float
    seconds: float

    def overrides(self) -> str:
        """The command line that trains like this and does not choose again."""
        changed = with_choice(self.cfg, self.ranks, self.chosen)
        return " ".join([*overrides(self.cfg, changed), "use_fastest_configuration=False"])

    def _speed(self, seconds: float | None) -> float | None:
        """Tokens per second and rank."""
        return self.tokens / self.ranks / seconds if seconds else None

    def _name(self, choice: Choice) -> str:
        changed = changes(self.own, choice)
        return ", ".join(f"{change.key}={change.new}" for change in changed) or "as configured"

    def text(self) -> str:
        lines = [
            f"Timed steps of the data's first rows on {self.device}; {self.row_length} tokens a row fit "
            f"({self.row_source}), {self.headroom:.0%} headroom; {self.seconds:.1f} s:"
        ]
        for each in self.timed:
            measured, predicted = self._speed(each.measured), self._speed(each.predicted)
            trial = self.tried.get(each.choice)
            parts = [f"{measured:,.0f} tokens/s per rank" if measured else "not timed"]
            if predicted:
                parts.append(f"predicted {predicted:,.0f}")
            if trial is not None:
                peak = bytes_of(trial.deciding.peak_bytes, trial.deciding.usable_bytes)
                parts.append(f"peak {peak}")
            mark = "*" if each.choice == self.chosen else " "
            lines.append(f"{mark} {self._name(each.choice)}: {', '.join(parts)}")
        changed = [str(change) for change in changes(self.own, self.chosen)]
        lines += changed or ["The config's own values stay."]
        split = self.split
        lines.append(
            f"global batch unchanged: {split.global_batch} rows (micro-batch {split.micro_batch} x "
            f"accumulation {split.accumulation} x {split.ranks} ranks)"
        )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "chosen": dict(self.chosen),
            "changes": [
                {"key": c.key, "old": c.old, "new": c.new, "effect": c.effect}
                for c in changes(self.own, self.chosen)
            ],
            "overrides": self.overrides(),
            "global_batch_size": self.split.global_batch,
            "ranks": self.ranks,
            "device": self.device,
            "row_length": self.row_length,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "timed": [
                {
                    "choice": dict(each.choice),
                    "seconds": list(each.seconds),
                    "tokens_per_second_per_rank": self._speed(each.measured),
                    "predicted_tokens_per_second_per_rank": self._speed(each.predicted),
                }
                for each in self.timed
            ],
            "trials": {str(dict(one)): trial.as_dict() for one, trial in self.tried.items()},
        }

    def write(self, folder: Path) -> list[Path]:
        """Write it as JSON; the path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / JSON_NAME
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        return [path]
