"""What choosing the fastest configuration reports: what was tried, what changes, what to paste."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import Block, Paragraph, Table, bytes_of
from torchtune_adaptive.core import Choice, SizeTrial, Split
from torchtune_adaptive.recipe.search.report import Report, numbers_of
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.knob_table import changes, overrides, with_choice


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
class FastestReport(Report):
    """The configuration that was chosen, and why."""

    name: ClassVar[str] = "fastest_configuration"
    cfg: DictConfig
    ranks: int
    own: Choice
    chosen: Choice
    split: Split
    timed: Sequence[TimedChoice]
    """The config's own values first, if they fit."""
    tried: Mapping[Choice, SizeTrial]
    tokens: int
    """Tokens in a step that was timed, over all ranks."""
    row_length: int
    row_source: str
    device: str
    headroom: float
    seconds: float

    def overrides(self) -> str:
        changed = with_choice(self.cfg, self.ranks, self.chosen)
        return " ".join([*overrides(self.cfg, changed), "use_fastest_configuration=False"])

    def applied_to(self, cfg: DictConfig) -> DictConfig:
        found = with_choice(cfg, self.ranks, self.chosen)
        # So that it trains the same when it is run again: timing might choose another.
        found.use_fastest_configuration = False
        if OmegaConf.select(found, f"{BLOCK}.search_only"):
            found[BLOCK].search_only = False  # there is nothing to search for any more
        return found

    def _speed(self, seconds: float | None) -> float | None:
        """Tokens per second and rank."""
        return self.tokens / self.ranks / seconds if seconds else None

    def _cells(self, each: TimedChoice) -> tuple[str, str, str, str]:
        """The name of a configuration, its speed as measured and as predicted, and its peak."""
        measured, predicted = (
            f"{speed:,.0f}" if (speed := self._speed(seconds)) else ""
            for seconds in (each.measured, each.predicted)
        )
        peak = ""
        if (trial := self.tried.get(each.choice)) is not None:
            peak = bytes_of(trial.deciding.peak_bytes, trial.deciding.usable_bytes)
        changed = ", ".join(
            f"{change.key}={change.new}" for change in changes(self.own, each.choice)
        )
        return changed or "as configured", measured, predicted, peak

    def text(self) -> str:
        lines = [
            f"Timed steps of the data's first rows on {self.device}; {self.row_length} tokens a row fit "
            f"({self.row_source}), {self.headroom:.0%} headroom; {self.seconds:.1f} s:"
        ]
        for each in self.timed:
            name, measured, predicted, peak = self._cells(each)
            mark = "*" if each.choice == self.chosen else " "
            parts = [f"{measured} tokens/s per rank" if measured else "not timed"]
            parts += [f"predicted {predicted}"] if predicted else []
            parts += [f"peak {peak}"] if peak else []
            lines.append(f"{mark} {name}: {', '.join(parts)}")
        changed = [str(change) for change in changes(self.own, self.chosen)]
        lines += changed or ["The config's own values stay."]
        split = self.split
        lines.append(f"global batch unchanged: {split.global_batch} rows ({split.text()})")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "chosen": dict(self.chosen),
            "changes": [asdict(change) for change in changes(self.own, self.chosen)],
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

    def numbers(self) -> dict[str, float]:
        trial = self.tried[self.chosen]
        result = self.split, self.row_length, trial, len(self.tried), self.seconds
        timed = next((each for each in self.timed if each.choice == self.chosen), None)
        return numbers_of(*result, self._speed(timed.measured) if timed else None)

    def blocks(self) -> list[Block]:
        header = ("configuration", "tokens/s per rank", "predicted", "peak")
        rows = [self._cells(each) for each in self.timed]
        return [Paragraph(self.text().splitlines()), Table("", header, rows)]
