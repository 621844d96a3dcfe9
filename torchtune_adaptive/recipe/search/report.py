"""What every search reports, and the files that it is written to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from omegaconf import DictConfig

from torchtune_adaptive.common import Block, plots
from torchtune_adaptive.core import SizeTrial, Split

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GIB = 1 << 30


class Report(Protocol):
    """What a search has found, and how."""

    name: ClassVar[str]
    """The name of its files, without the ending."""
    use_of_overrides: ClassVar[str] = "To skip the search next time"
    """What ``overrides`` are for, in words."""

    def text(self) -> str:
        """What was found, in a few lines for the log."""

    def blocks(self) -> list[Block]:
        """All of it for people: the text, the figure if there is one, and a table of what was tried."""

    def as_dict(self) -> dict[str, Any]:
        """All of it for JSON."""

    def numbers(self) -> dict[str, float]:
        """The result for a metric logger."""

    def overrides(self) -> str:
        """What to add to the command line to train like this without a search; empty where there is none."""

    def figure(self) -> Figure | None:
        """A plot of the search; None where there is none, or matplotlib is not installed."""
        return None

    def applied_to(self, cfg: DictConfig) -> DictConfig:
        """The config with what was chosen; the batch size is set elsewhere, since a resumed run may have
        another."""
        return cfg


def write(report: Report, folder: Path) -> list[Path]:
    """The JSON file and, if there is one, the figure; the paths of what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report.name}.json"
    path.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
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
    split: Split,
    row_length: int,
    trial: SizeTrial,
    trials: int,
    seconds: float,
    speed: float | None = None,
) -> dict[str, float]:
    """What a search came to: the batch, the trial of what was chosen and, if that was timed, its tokens per
    second and rank."""
    found: dict[str, float] = {
        **batch_numbers(split),
        "row_length": row_length,
        "trials": trials,
        "seconds": round(seconds, 3),
        "peak_memory_gib": round(trial.deciding.peak_bytes / _GIB, 4),
        "usable_memory_gib": round(trial.deciding.usable_bytes / _GIB, 4),
    }
    return found if speed is None else {**found, "tokens_per_second_per_gpu": round(speed, 1)}
