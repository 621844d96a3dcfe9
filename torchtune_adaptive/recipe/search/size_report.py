"""What a search reports: the choice and its reason, JSON, a plot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torchtune_adaptive.common import Block, Drawing, counted, plots
from torchtune_adaptive.core import Split
from torchtune_adaptive.recipe.data.rows import RowSize
from torchtune_adaptive.recipe.search import drawn
from torchtune_adaptive.recipe.search.report import (
    Report,
    batch_numbers,
    numbers_of,
    reason,
    table_of,
)
from torchtune_adaptive.recipe.search.sizing import FoundRows
from torchtune_adaptive.recipe.settings.adaptive import BLOCK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEW_STEPS = 20
"""Optimizer steps per epoch below which a larger batch rarely trains as well."""


@dataclass(frozen=True)
class SearchReport(Report):
    """A finished search and what it was about."""

    name: ClassVar[str] = "batch_size_search"
    result: FoundRows
    before: Split
    strategy: str
    row: RowSize
    row_source: str
    device: str
    headroom: float
    seconds: float
    samples: int
    """Samples of all ranks in an epoch."""
    lr: float | None
    """The learning rate of the config, which no search changes."""
    limit: str | None
    """The limit of the candidates, where the largest of them was found: the data, the steps in an epoch, a
    setting, or the rows in a step."""
    resumed: bool = False
    """Whether the run has trained with ``split`` before, and only makes sure that it fits."""

    @property
    def largest(self) -> int:
        """The largest micro-batch that fits."""
        assert self.result.size is not None, "a search that found nothing has no report"
        return self.result.size

    @property
    def uses_what_was_found(self) -> bool:
        """Whether training starts with what was found, or may only grow to it."""
        return self.split.micro_batch == self.largest

    def reason(self) -> str:
        """Why this size and not the next."""
        return reason(self.result, self.sample, self.limit)

    def steps_per_epoch(self, split: Split) -> int:
        return self.samples // split.global_batch

    def consequences(self) -> list[str]:
        """What a changed global batch means for training."""
        old, new = self.before, self.split
        if self.resumed or old.global_batch == new.global_batch:
            return []
        steps = self.steps_per_epoch(new)
        lines = [
            f"steps per epoch {self.steps_per_epoch(old)} -> {steps}; learning rate unchanged "
            f"({self.lr}); {BLOCK}.keep_global_batch=True keeps the global batch at {old.global_batch}"
        ]
        if steps < FEW_STEPS:
            lines.append(
                f"Warning: only {counted(steps, 'optimizer step')} per epoch. Keep the global "
                f"batch, lower {BLOCK}.ceiling, or adjust the learning rate and the number of epochs."
            )
        return lines

    def _choice(self) -> str:
        """The micro-batch before and after, in words."""
        old, new, largest = self.before.micro_batch, self.split.micro_batch, self.largest
        if self.resumed:
            return f"{new}" if new == largest else f"{new}; the largest is {largest}"
        return f"{old} -> {new}" if self.uses_what_was_found else f"{old} may grow to {largest}"

    def overrides(self) -> str:
        # Training that may grow to what was found searches in any case.
        return self._words() if self.uses_what_was_found else ""

    def _words(self) -> str:
        return (
            f"batch_size={self.split.micro_batch} "
            f"gradient_accumulation_steps={self.split.accumulation} use_maximum_batch_size=False"
        )

    def text(self) -> str:
        old, new = self.before, self.split
        lines = [
            f"Searched with {self.sample}s of {self.row} ({self.row_source}) on {self.device}, "
            f"{self.headroom:.0%} headroom; {self.strategy}, {self.seconds:.1f} s:",
            f"batch_size {self._choice()} ({self.reason()})",
        ]
        if new.accumulation != old.accumulation and not self.resumed:
            lines.append(f"gradient_accumulation_steps {old.accumulation} -> {new.accumulation}")
        parts, new_batch = new.text(), counted(new.global_batch, self.sample)
        if self.resumed:
            lines.append(f"global batch as before: {new_batch} ({parts})")
        elif old.global_batch == new.global_batch:
            lines.append(self.batch_unchanged())
        else:
            lines.append(f"global batch {old.global_batch:,} -> {new_batch} ({parts})")
        if self.validation is not None:
            lines.append(f"validation in micro-batches of {self.validation.size}")
        return "\n".join([*lines, *self.consequences()])

    def as_dict(self) -> dict[str, Any]:
        return {
            **self._batch(self.split),
            "largest_batch_size": self.largest,
            "before": self._batch(self.before),
            "ranks": self.split.ranks,
            "reason": self.reason(),
            "overrides": self._words(),
            "strategy": self.strategy,
            "row_length": self.row.tokens,
            "images_per_row": self.row.images,
            "tiles_per_image": self.row.tiles,
            "row_length_source": self.row_source,
            "device": self.device,
            "headroom": self.headroom,
            "seconds": self.seconds,
            "trials": [trial.as_dict() for trial in self.result.trials],
            "validation": self.validation.as_dict() if self.validation else None,
        }

    def _batch(self, split: Split) -> dict[str, int]:
        return {**batch_numbers(split), "steps_per_epoch": self.steps_per_epoch(split)}

    def numbers(self) -> dict[str, float]:
        trials = self.result.trials
        best = next(trial for trial in trials if trial.size == self.largest)
        found = numbers_of(self.split, self.row.tokens, best, len(trials), self.seconds)
        return {"largest_batch_size": self.largest, **found}

    def details(self) -> list[Block]:
        return [Drawing(self.figure()), table_of(self.result.trials)]

    def figure(self) -> Figure | None:
        """Peak memory over micro-batch size, with the usable memory and the size that was chosen."""
        figure = plots.new_figure(6.4, 4)
        if figure is None:
            return None
        axes = figure.subplots()
        drawn.memory_by_rows(axes, self.result, f"{self.sample}s of {self.row}", self.headroom)
        axes.set(title=f"Search on {self.device}: batch_size {self._choice()}")
        plots.legend_below(figure)
        return figure
