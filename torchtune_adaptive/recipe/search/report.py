"""What every search reports, and the files that it is written to."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig

from torchtune_adaptive.common import Block, Paragraph, Table, counted, durable, plots
from torchtune_adaptive.core import Budget, SizeTrial, Split, strategies
from torchtune_adaptive.recipe.search.in_tokens import LengthTrial
from torchtune_adaptive.recipe.search.sizing import FoundRows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Report(ABC):
    """What a search has found, and how."""

    name: ClassVar[str]
    """The name of its files, without the ending."""
    use_of_overrides: ClassVar[str] = "To skip the search next time"
    """What ``overrides`` are for, in words."""

    split: Split
    """The batch that training starts with."""
    sample: str = "row"
    """What a row is called."""
    validation: SizeTrial | None = None
    """The trial of validation that fits, where there is any."""

    @abstractmethod
    def text(self) -> str:
        """What was found, in a few lines for the log."""

    @abstractmethod
    def details(self) -> list[Block]:
        """What people see below the text: the figure if there is one, and a table of what was tried."""

    def blocks(self) -> list[Block]:
        """All of it for people."""
        return [Paragraph(self.text().splitlines()), *self.details()]

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """All of it for JSON."""

    @abstractmethod
    def numbers(self) -> dict[str, float]:
        """The result for a metric logger."""

    def overrides(self) -> str:
        """What to add to the command line to train like this without a search; empty where there is none."""
        return ""

    def figure(self) -> Figure | None:
        """A plot of the search; None where there is none, or matplotlib is not installed."""
        return None

    def applied_to(self, cfg: DictConfig) -> DictConfig:
        """The config with what was chosen; the batch size is set elsewhere, since a resumed run may have
        another."""
        return cfg

    def batch_unchanged(self, divided: bool = True) -> str:
        """The global batch, which a search leaves as it is, and how it is ``divided``, if that is known."""
        rows = counted(self.split.global_batch, self.sample)
        return f"global batch unchanged: {rows}" + (f" ({self.split.text()})" if divided else "")


def reason(found: FoundRows, sample: str = "row", limit: str | None = None) -> str:
    """Why this size and not the next.

    Args:
        found: the result of a search in rows.
        sample: what a row is called.
        limit: what allows no larger size, where there is none.
    """
    if found.status is not strategies.Status.NEXT_DOES_NOT_FIT:
        return f"{found.status.value}: {limit}" if limit else found.status.value
    failed = min((trial for trial in found.trials if not trial.fits), key=lambda trial: trial.size)
    where = f"{failed.deciding.trouble} on rank {failed.deciding_rank}"
    return f"{counted(failed.size, sample)} {'does' if failed.size == 1 else 'do'} not fit: {where}"


def rows_by_length(budget: Budget) -> str:
    """What was measured, in words."""
    return ", ".join(f"{rows} x {length}" for length, rows in budget.measured)


def table_of(trials: Sequence[SizeTrial | LengthTrial], title: str = "") -> Table:
    return Table(title, trials[0].COLUMNS, [each.cells() for each in trials])


def write(report: Report, folder: Path) -> list[Path]:
    """The JSON file and, if there is one, the figure; the paths of what was written."""
    path = folder / f"{report.name}.json"
    with durable.atomically(path, flush=False) as temporary:
        temporary.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    figure = report.figure()
    return [path, plots.save(figure, path.with_suffix(".png"))] if figure else [path]


def batch_numbers(split: Split) -> dict[str, int]:
    """A batch, by the keys of a config."""
    return {
        "batch_size": split.micro_batch,
        "gradient_accumulation_steps": split.accumulation,
        "global_batch_size": split.global_batch,
    }


def numbers_of(
    split: Split, row_length: int, trial: SizeTrial, trials: int, seconds: float
) -> dict[str, float]:
    """What a search came to: the batch, and the trial of what was chosen."""
    return {
        **batch_numbers(split),
        "row_length": row_length,
        "trials": trials,
        "seconds": round(seconds, 3),
        "peak_memory_gib": round(trial.deciding.peak_bytes / _GIB, 4),
        "usable_memory_gib": round(trial.deciding.usable_bytes / _GIB, 4),
    }
