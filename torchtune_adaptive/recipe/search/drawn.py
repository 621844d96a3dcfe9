"""What a search tried, drawn on axes: in rows and in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchtune_adaptive.common import human_bytes, plots
from torchtune_adaptive.core import Budget
from torchtune_adaptive.recipe.search.in_tokens import LengthTrial
from torchtune_adaptive.recipe.search.sizing import FoundRows


def memory_by_rows(axes: Any, found: FoundRows, rows: str, headroom: float) -> None:
    """Peak memory over micro-batch size, with the usable memory and the largest size that fits.

    Args:
        axes: matplotlib's axes.
        found: the result of the search.
        rows: what micro-batches were made of, in words.
        headroom: the share of memory that the search left free.
    """
    trials = sorted(found.trials, key=lambda trial: trial.size)
    usable = trials[0].deciding.usable_bytes
    unit, bytes_each = plots.memory_unit(usable)
    peaks = {t.size: t.deciding.peak_bytes / bytes_each for t in trials if t.fits}
    largest = next(trial for trial in trials if trial.size == found.size)
    failing = [trial.size for trial in trials if not trial.fits]
    axes.axhline(
        usable / bytes_each,
        color=plots.GRAY,
        linestyle="--",
        label=f"usable memory: {human_bytes(usable)} ({headroom:.0%} headroom)",
    )
    axes.plot(*zip(*peaks.items(), strict=True), "o-", color=plots.BLUE, label="fits")
    axes.plot(
        largest.size,
        peaks[largest.size],
        "o",
        color=plots.GREEN,
        markersize=11,
        label="largest that fits",
    )
    if failing:
        axes.plot(
            failing,
            [usable / bytes_each] * len(failing),
            "X",
            color=plots.RED,
            markersize=9,
            label="does not fit",
            clip_on=False,
        )
    axes.set(
        xlabel=f"micro-batch ({rows})",
        ylabel=f"peak memory, tightest rank ({unit})",
        xlim=(0, 1.05 * trials[-1].size),
        ylim=(0, 1.15 * usable / bytes_each),
    )
    plots.whole_numbers(axes.xaxis)
    plots.tidy(axes)


def rows_by_length(axes: Any, budget: Budget, trials: Sequence[LengthTrial]) -> None:
    """Rows over length: the budget, and what was tried."""
    shortest = min(length for length, _ in budget.measured)
    lengths = range(max(1, shortest // 2), budget.longest + 1)
    rows = [budget.rows(length) for length in lengths]
    axes.step(lengths, rows, color=plots.BLUE, label="token budget", where="mid")
    for fits, marker, color, label in (
        (True, "o", plots.GREEN, "fits"),
        (False, "X", plots.RED, "does not fit"),
    ):
        tried = [each for each in trials if each.trial.fits is fits]
        if tried:
            axes.plot(
                [each.length for each in tried],
                [each.trial.size for each in tried],
                marker,
                color=color,
                label=f"tried: {label}",
            )
    axes.set(
        xlabel="longest row of a micro-batch (tokens)",
        ylabel="micro-batch (rows)",
        ylim=(0, None),
    )
    plots.whole_numbers(axes.xaxis)
    plots.whole_numbers(axes.yaxis)
    plots.tidy(axes)
