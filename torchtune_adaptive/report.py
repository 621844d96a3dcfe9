"""What the user sees: of a search each trial, a table, the choice and why, JSON, a plot; of training, what
changed the batch."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune_adaptive.probe import SizeTrial
from torchtune_adaptive.search import SearchResult, Status

log = logging.getLogger(__name__)

JSON_NAME = "batch_size_search.json"
PLOT_NAME = "batch_size_search.png"
EVENTS_NAME = "batch_size_events.jsonl"


@dataclass(frozen=True)
class Split:
    """How a global batch is put together."""

    micro_batch: int
    accumulation: int
    ranks: int
    rows: int = 0
    """On each rank; given where the last micro-batch is smaller than the others."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.rows or self.micro_batch * self.accumulation)

    @property
    def global_batch(self) -> int:
        return self.rows * self.ranks


@dataclass(frozen=True)
class SearchReport:
    """A finished search and what it was about."""

    result: SearchResult[SizeTrial]
    before: Split
    after: Split
    strategy: str
    row_length: int
    row_source: str
    device: str
    headroom: float
    seconds: float

    @property
    def largest(self) -> int:
        """The largest micro-batch that fits."""
        assert self.result.size is not None, "a search that found nothing has no report"
        return self.result.size

    @property
    def uses_what_was_found(self) -> bool:
        """Or whether it is only how far the batch may grow."""
        return self.after.micro_batch == self.largest

    def reason(self) -> str:
        """Why this size and not the next."""
        if self.result.status is not Status.NEXT_DOES_NOT_FIT:
            return self.result.status.value
        failed = min(
            (trial for trial in self.result.trials if not trial.fits), key=lambda t: t.size
        )
        return f"{failed.size} rows do not fit: {failed.deciding.trouble} on rank {failed.deciding_rank}"

    def overrides(self) -> str:
        """The command line that trains with this result and does not search again."""
        return (
            f"batch_size={self.after.micro_batch} "
            f"gradient_accumulation_steps={self.after.accumulation} use_maximum_batch_size=False"
        )

    def text(self) -> str:
        old, new = self.before, self.after
        lines = [
            f"Trials of {self.row_length} tokens a row ({self.row_source}) on {self.device}, "
            f"{self.headroom:.0%} of memory kept free; {self.strategy}, {self.seconds:.1f} s:",
            *_table(self.result.trials),
            f"batch_size {old.micro_batch} -> {new.micro_batch} ({self.reason()})"
            if self.uses_what_was_found
            else f"batch_size {old.micro_batch} may grow to {self.largest} ({self.reason()})",
        ]
        if new.accumulation != old.accumulation:
            lines.append(f"gradient_accumulation_steps {old.accumulation} -> {new.accumulation}")
        change = "stays" if old.global_batch == new.global_batch else f"{old.global_batch} ->"
        lines += [
            f"global batch {change} {new.global_batch} rows "
            f"({new.micro_batch} x {new.accumulation} x {new.ranks} ranks)",
        ]
        return "\n".join(lines)

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
            },
            "ranks": self.after.ranks,
            "reason": self.reason(),
            "overrides": self.overrides(),
            "strategy": self.strategy,
            "row_length": self.row_length,
            "row_length_source": self.row_source,
            "device": self.device,
            "headroom": self.headroom,
            "seconds": self.seconds,
            "trials": [trial.as_dict() for trial in self.result.trials],
        }

    def write(self, folder: Path) -> list[Path]:
        """The JSON file and, where matplotlib is installed, the plot; the paths of what was written."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / JSON_NAME
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        plot = _plot(self, folder / PLOT_NAME)
        return [path, plot] if plot else [path]


class Events:
    """What happened to the batch in training: a log line and a row of JSON for each.

    Args:
        folder: where the file lies; None on ranks that keep silent. A resumed run goes on with the file.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / EVENTS_NAME if folder else None

    def changed(self, step: int, reason: str, **what: tuple[int, int]) -> None:
        """Something, as ``micro_batch``, is another one from ``step`` on; before and after."""
        if self._path is None:
            return
        (first, change), *others = (
            (name.replace("_", "-" if name == "micro_batch" else " "), f"{before} -> {after}")
            for name, (before, after) in what.items()
        )
        line = f"{first} {change} ({reason}, step {step})"
        log.info("; ".join([line, *(f"{name} {change}" for name, change in others)]))
        self._write({"step": step, "reason": reason, **{k: list(v) for k, v in what.items()}})

    def grown(self, before: Split, after: Split, samples: int, step: int, reason: str) -> None:
        """The global batch is another one from ``step`` on; as ``schedule.Replay`` reads it."""
        if self._path is None:
            return
        log.info(
            f"global batch {before.global_batch} -> {after.global_batch} ({reason}, after {samples} samples, "
            f"step {step}): {after.micro_batch} x {after.accumulation} x {after.ranks} ranks"
        )
        self._write(
            {
                "step": step,
                "reason": reason,
                "samples": samples,
                "global_batch": [before.global_batch, after.global_batch],
                "micro_batch": [before.micro_batch, after.micro_batch],
                "accumulation": [before.accumulation, after.accumulation],
            }
        )

    def noticed(self, step: int, what: str) -> None:
        """Something that changed nothing."""
        if self._path is None:
            return
        log.warning(f"{what} (step {step})")
        self._write({"step": step, "reason": what})

    def _write(self, row: dict[str, Any]) -> None:
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def trial_line(trial: SizeTrial) -> str:
    """One line for a trial, as soon as it is over."""
    decided = trial.deciding
    return (
        f"trial of {trial.size} rows: {decided.trouble or 'fits'}; peak {_size(decided.peak_bytes)} of "
        f"{_size(decided.usable_bytes)} on rank {trial.deciding_rank}, {trial.seconds:.1f} s"
    )


def _table(trials: tuple[SizeTrial, ...]) -> list[str]:
    header = ("rows", "peak", "usable", "verdict", "seconds", "deciding rank")
    rows = [
        (
            str(trial.size),
            _size(trial.deciding.peak_bytes),
            _size(trial.deciding.usable_bytes),
            trial.deciding.trouble or "fits",
            f"{trial.seconds:.1f}",
            str(trial.deciding_rank),
        )
        for trial in trials
    ]
    return table(header, rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns that are as wide as they must be."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def _size(number: int) -> str:
    """Bytes for people: three digits that mean something."""
    amount = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if amount >= 100 or unit == "B" else f"{amount:.3g} {unit}"


def _plot(report: SearchReport, path: Path) -> Path | None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    trials = sorted(report.result.trials, key=lambda trial: trial.size)
    fitting = [trial for trial in trials if trial.fits]
    failing = [trial for trial in trials if not trial.fits]
    gib = 1 << 30
    unit, divisor = ("GiB", gib) if trials[0].deciding.usable_bytes >= gib else ("MiB", 1 << 20)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [trial.size for trial in fitting],
        [trial.deciding.peak_bytes / divisor for trial in fitting],
        "o-",
        label="fits",
    )
    if failing:
        axes.plot(
            [trial.size for trial in failing],
            [trial.deciding.usable_bytes / divisor for trial in failing],
            "x",
            color="tab:red",
            label="does not fit",
        )
    axes.axhline(
        trials[0].deciding.usable_bytes / divisor, color="gray", linestyle="--", label="usable"
    )
    axes.axvline(report.largest, color="tab:green", alpha=0.4, label="largest that fits")
    axes.set(
        xlabel=f"rows of {report.row_length} tokens in a micro-batch",
        ylabel=f"peak memory of the tightest rank ({unit})",
        ylim=(0, None),
        xlim=(0, None),
    )
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
