"""The curves of a run: what is watched, batch, learning rate, seconds and memory, over samples and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtune_adaptive.common import human_bytes, plots
from torchtune_adaptive.recipe.train.history import History, Mark, MarkKind, Point
from torchtune_adaptive.recipe.train.watched import KL, LENGTH, LOSS, PHASES, REWARD, TRAINING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_NAME = "training.png"
_LABELS = {REWARD: "reward (mean)", LENGTH: "response length (tokens)", KL: "KL to the reference"}
_STYLES: dict[MarkKind, dict[str, Any]] = {
    MarkKind.CHANGED: {"color": plots.PURPLE, "linestyle": "-", "linewidth": 1.0},
    MarkKind.RETRIED: {"color": plots.RED, "linestyle": ":", "linewidth": 1.6},
    MarkKind.RESUMED: {"color": "#333333", "linestyle": "-.", "linewidth": 1.2},
}
"""How the lines of marks look; those that may be at the same place can be told apart."""

Panel = Callable[[Any], None]
"""A function that draws one of the curves on axes, without the axis of samples."""


def figures(history: History) -> list[Figure]:
    """A figure for each curve; none as long as there is nothing to see, or without matplotlib."""
    found = []
    for panel in panels(history):
        if (figure := plots.new_figure(6.4, 3.4)) is None:
            return []
        axes = figure.subplots()
        panel(axes)
        _draw_marks(axes, history.marks)
        _over_samples([axes], history.points)
        plots.legend_below(figure, columns=2)
        found.append(figure)
    return found


def figure(history: History) -> Figure | None:
    """All curves in one figure."""
    drawn = panels(history)
    if not drawn or (whole := plots.new_figure(8, 1 + 2 * len(drawn))) is None:
        return None
    stacked = list(whole.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0])
    for panel, axes in zip(drawn, stacked, strict=True):
        panel(axes)
        if axes.get_legend_handles_labels()[0]:
            plots.legend_beside(axes)
        marks = _draw_marks(axes, history.marks)
    _over_samples(stacked, history.points)
    plots.legend_below(whole, lines=marks)
    whole.align_ylabels(stacked)
    return whole


def panels(history: History) -> list[Panel]:
    """What can be drawn, the most important first; nothing as long as there are too few steps."""
    points = history.points
    if len(points) < 2:
        return []
    names = [name for name in points[-1].values if name != LOSS]
    labels = {**_LABELS, LOSS: f"loss (nats/{history.loss_unit})"}
    found: list[Panel] = [partial(_values, points, name, labels[name]) for name in [*names, LOSS]]
    if points[-1].seconds:
        found.append(partial(_seconds, points))
    found += [partial(_batches, points), partial(_learning_rate, points)]
    if any(point.peak_bytes for point in points):
        found.append(partial(_memory, points))
    return found


def _values(points: Sequence[Point], name: str, label: str, axes: Any) -> None:
    known = [(point.samples, point.values[name]) for point in points if name in point.values]
    axes.plot(*zip(*known, strict=True), color=plots.BLUE)
    axes.set(ylabel=label)


def _seconds(points: Sequence[Point], axes: Any) -> None:
    of = {phase: "of a rollout" for phase in PHASES} | {TRAINING: "of a step"}
    samples = [point.samples for point in points]
    for (phase, what), color in zip(of.items(), plots.COLORS, strict=False):
        seconds = [point.seconds.get(phase, 0.0) for point in points]
        axes.plot(samples, seconds, color=color, label=f"{phase} {what}")
    axes.set(ylabel="seconds by phase", ylim=(0, None))


def _batches(points: Sequence[Point], axes: Any) -> None:
    samples = [point.samples for point in points]
    whole = [point.global_batch for point in points]
    micro = [point.micro_batch for point in points]
    axes.step(samples, whole, where="pre", color=plots.BLUE, label="global batch")
    axes.step(samples, micro, where="pre", color=plots.ORANGE, linestyle="--", label="micro-batch")
    axes.set(ylabel="batch (rows)", ylim=(0, 1.1 * max(whole)))
    plots.whole_numbers(axes.yaxis)


def _learning_rate(points: Sequence[Point], axes: Any) -> None:
    axes.plot([point.samples for point in points], [point.lr for point in points], color=plots.BLUE)
    axes.set(ylabel="learning rate", ylim=(0, None))


def _memory(points: Sequence[Point], axes: Any) -> None:
    measured = [point for point in points if point.peak_bytes and point.limit_bytes]
    samples = [point.samples for point in measured]
    most = max(point.limit_bytes or 0 for point in measured)
    unit, each = plots.memory_unit(most)
    limits = [(point.limit_bytes or 0) / each for point in measured]
    peaks = [(point.peak_bytes or 0) / each for point in measured]
    label = f"limit: {human_bytes(measured[-1].limit_bytes or 0)}"
    axes.step(samples, limits, where="pre", color=plots.GRAY, linestyle="--", label=label)
    axes.plot(samples, peaks, color=plots.BLUE, label="peak")
    axes.set(ylabel=f"peak memory, rank 0 ({unit})", ylim=(0, 1.1 * most / each))


def _draw_marks(axes: Any, marks: dict[MarkKind, list[Mark]]) -> list[Any]:
    """Draw a line for each mark; gives one of each kind, with a label. A mark that is the only one of its
    kind is named by its own text."""
    named = []
    for what, style in _STYLES.items():
        found = marks[what]
        lines = [axes.axvline(mark.samples, zorder=1, **style) for mark in found]
        if lines:
            several = f"{what} ({len(found)} times)"
            lines[0].set_label(found[0].text if len(found) == 1 else several)
            named.append(lines[0])
    return named


def _over_samples(stacked: Sequence[Any], points: Sequence[Point]) -> None:
    """Finish axes that stand above each other: samples below, steps above."""
    for axes in stacked:
        plots.tidy(axes)
    stacked[-1].set(xlabel="samples trained on")
    plots.whole_numbers(stacked[-1].xaxis)
    samples = _extended([point.samples for point in points])
    steps = _extended([point.step for point in points])
    scales = partial(np.interp, xp=samples, fp=steps), partial(np.interp, xp=steps, fp=samples)
    above = stacked[0].secondary_xaxis("top", functions=scales)
    above.set(xlabel="step")
    plots.whole_numbers(above.xaxis)
    above.spines["top"].set_visible(False)


def _extended(numbers: list[int]) -> list[int]:
    """Ascending numbers, continued as they begin and end: axes reach farther than their curves."""
    count = len(numbers)
    (first, second), (before, last) = numbers[:2], numbers[-2:]
    return [first - count * (second - first), *numbers, last + count * (last - before)]
