"""What a search reports: the choice and its reason, JSON, a plot."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtune_adaptive.common import (
    BLUE,
    GRAY,
    GREEN,
    RED,
    human_bytes,
    legend_below,
    memory_unit,
    new_figure,
    save,
    tidy,
    whole_numbers,
)
from torchtune_adaptive.core import (
    TRIAL_COLUMNS,
    SearchResult,
    SizeTrial,
    Split,
    Status,
    trial_cells,
)
from torchtune_adaptive.recipe.data.images import RowSize
from torchtune_adaptive.recipe.settings.adaptive import BLOCK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)
JSON_NAME = "batch_size_search.json"
PLOT_NAME = "batch_size_search.png"
GIB = 1 << 30
FEW_STEPS = 20
"""Below so many optimizer steps per epoch a larger batch rarely trains as well."""


@dataclass(frozen=True)
class SearchReport:
    """A finished search and what it was about."""

    result: SearchResult[SizeTrial]
    before: Split
    after: Split
    strategy: str
    row: RowSize
    row_source: str
    device: str
    headroom: float
    seconds: float
    rows_per_rank: int
    """Rows that each rank has in an epoch."""
    lr: float | None
    """The learning rate of the config, which no search changes."""
    ceiling: str
    """What limits the candidates: the data, a setting, or the rows in a step."""
    validation: SizeTrial | None = None
    """The trial of validation that fits, where there is any."""

    @property
    def largest(self) -> int:
        """The largest micro-batch that fits."""
        assert self.result.size is not None, "a search that found nothing has no report"
        return self.result.size

    @property
    def uses_what_was_found(self) -> bool:
        """Whether training starts with what was found, or may only grow to it."""
        return self.after.micro_batch == self.largest

    def reason(self) -> str:
        """Why this size and not the next."""
        if self.result.status is Status.CEILING:
            return f"{Status.CEILING.value}: {self.ceiling}"
        if self.result.status is not Status.NEXT_DOES_NOT_FIT:
            return self.result.status.value
        failed = min(
            (trial for trial in self.result.trials if not trial.fits), key=lambda t: t.size
        )
        return f"{failed.size} rows do not fit: {failed.deciding.trouble} on rank {failed.deciding_rank}"

    def steps_per_epoch(self, split: Split) -> int:
        return self.rows_per_rank // split.rows

    def consequences(self) -> list[str]:
        """What a changed global batch means for training."""
        old, new = self.before, self.after
        if old.global_batch == new.global_batch:
            return []
        steps = self.steps_per_epoch(new)
        lines = [
            f"steps per epoch {self.steps_per_epoch(old)} -> {steps}; learning rate unchanged "
            f"({self.lr}); {BLOCK}.keep_global_batch=True keeps the global batch at {old.global_batch}"
        ]
        if steps < FEW_STEPS:
            lines.append(
                f"Warning: {steps} optimizer step{'s'[: steps != 1]} per epoch are few. Keep the global "
                f"batch, lower {BLOCK}.ceiling, or adjust the learning rate and the number of epochs."
            )
        return lines

    def overrides(self) -> str:
        """The command line that trains with this result and does not search again."""
        return (
            f"batch_size={self.after.micro_batch} "
            f"gradient_accumulation_steps={self.after.accumulation} use_maximum_batch_size=False"
        )

    def text(self) -> str:
        old, new = self.before, self.after
        lines = [
            f"Searched with rows of {self.row} ({self.row_source}) on {self.device}, "
            f"{self.headroom:.0%} headroom; {self.strategy}, {self.seconds:.1f} s:",
            f"batch_size {old.micro_batch} -> {new.micro_batch} ({self.reason()})"
            if self.uses_what_was_found
            else f"batch_size {old.micro_batch} may grow to {self.largest} ({self.reason()})",
        ]
        if new.accumulation != old.accumulation:
            lines.append(f"gradient_accumulation_steps {old.accumulation} -> {new.accumulation}")
        parts = new.text()
        if old.global_batch == new.global_batch:
            lines.append(f"global batch unchanged: {new.global_batch} rows ({parts})")
        else:
            lines.append(f"global batch {old.global_batch} -> {new.global_batch} rows ({parts})")
        if self.validation is not None:
            lines.append(f"validation in micro-batches of {self.validation.size}")
        return "\n".join([*lines, *self.consequences()])

    def as_dict(self) -> dict[str, Any]:
        return {
            "batch_size": self.after.micro_batch,
            "largest_batch_size": self.largest,
            "gradient_accumulation_steps": self.after.accumulation,
            "global_batch_size": self.after.global_batch,
            "before": {
                "batch_size": self.before.micro_batch,
                "gradient_accumulation_steps": self.before.accumulation,
                "global_batch_size": self.before.global_batch,
                "steps_per_epoch": self.steps_per_epoch(self.before),
            },
            "ranks": self.after.ranks,
            "reason": self.reason(),
            "overrides": self.overrides(),
            "steps_per_epoch": self.steps_per_epoch(self.after),
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

    def numbers(self) -> dict[str, float]:
        """The result for a metric logger."""
        best = next(trial for trial in self.result.trials if trial.size == self.largest)
        found: dict[str, float] = {
            "batch_size": self.after.micro_batch,
            "largest_batch_size": self.largest,
            "gradient_accumulation_steps": self.after.accumulation,
            "global_batch_size": self.after.global_batch,
            "row_length": self.row.tokens,
            "trials": len(self.result.trials),
            "seconds": round(self.seconds, 3),
            "peak_memory_gib": round(best.deciding.peak_bytes / GIB, 4),
            "usable_memory_gib": round(best.deciding.usable_bytes / GIB, 4),
        }
        if (speed := best.tokens_per_second) is not None:
            found["tokens_per_second_per_gpu"] = round(speed, 1)
        return found

    def trial_table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """The names of the columns, and a row for each trial."""
        return TRIAL_COLUMNS, [trial_cells(trial) for trial in self.result.trials]

    def write(self, folder: Path) -> list[Path]:
        """The JSON file and, where matplotlib is installed, the plot; the paths of what was written."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / JSON_NAME
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        figure = self.figure()
        return [path, save(figure, folder / PLOT_NAME)] if figure else [path]

    def figure(self) -> Figure | None:
        """Peak memory over micro-batch size, with the usable memory and the size that was chosen."""
        figure = new_figure(6.4, 4)
        if figure is None:
            return None
        trials = sorted(self.result.trials, key=lambda trial: trial.size)
        fitting = [trial for trial in trials if trial.fits]
        failing = [trial for trial in trials if not trial.fits]
        usable = trials[0].deciding.usable_bytes
        unit, bytes_each = memory_unit(usable)
        peaks = {trial.size: trial.deciding.peak_bytes / bytes_each for trial in fitting}
        axes = figure.subplots()
        axes.axhline(
            usable / bytes_each,
            color=GRAY,
            linestyle="--",
            label=f"usable memory: {human_bytes(usable)} ({self.headroom:.0%} headroom)",
        )
        axes.plot(*zip(*peaks.items(), strict=True), "o-", color=BLUE, label="fits")
        chosen = (self.largest, peaks[self.largest])
        axes.plot(*chosen, "o", color=GREEN, markersize=11, label="largest that fits")
        if failing:
            axes.plot(
                [trial.size for trial in failing],
                [usable / bytes_each] * len(failing),
                "X",
                color=RED,
                markersize=9,
                label="does not fit",
                clip_on=False,
            )
        old, new = self.before.micro_batch, self.after.micro_batch
        change = (
            f"{old} -> {new}" if self.uses_what_was_found else f"{old} may grow to {self.largest}"
        )
        axes.set(
            title=f"Search on {self.device}: batch_size {change}",
            xlabel=f"micro-batch (rows of {self.row})",
            ylabel=f"peak memory, tightest rank ({unit})",
            xlim=(0, 1.05 * trials[-1].size),
            ylim=(0, 1.15 * usable / bytes_each),
        )
        whole_numbers(axes.xaxis)
        tidy(axes)
        legend_below(figure)
        return figure
