"""The plot of a plan: peak memory over batch size, memory over one step, speed against memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchtune_adaptive.cli.candidates_report import draw_fastest
from torchtune_adaptive.cli.plan_report import PlanReport
from torchtune_adaptive.common import ConfigError, plots
from torchtune_adaptive.recipe import Prediction

_WHAT_IFS = 5
"""Number of what-ifs that are drawn; more could not be told apart."""
_NARROW = 0.04
"""Share of a step's operations below which a phase is too narrow for its name."""


def draw(report: PlanReport, path: Path) -> None:
    """Plot peak memory over batch size, and memory over one step.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = plots.new_figure(9, 13 if report.fastest else 9)
    if figure is None:
        remedy = "Install it: pip install matplotlib"
        raise ConfigError("--plot", str(path), "needs matplotlib", remedy)
    sizes, step, *more = figure.subplots(3 if report.fastest else 2, 1)
    plan = report.plan
    devices = f"{plan.ranks} x {plan.device.name}"
    figure.suptitle(f"{plan.name} on {devices}, rows of {plan.length} tokens")
    _draw_sizes(sizes, report)
    _draw_step(step, report.found)
    if report.fastest is not None:
        draw_fastest(more[0], report.fastest)
    plots.save(figure, path)


def _draw_sizes(axes: Any, report: PlanReport) -> None:
    usable = report.plan.device.usable_bytes
    unit, bytes_each = plots.memory_unit(usable)
    what_ifs = [(one.name, one.answer) for one in report.outcomes if one.answer]
    what_ifs.sort(key=lambda one: (-one[1].largest, one[1].configured.reserved))
    named = [("as configured", report.found), *what_ifs[:_WHAT_IFS]]
    for (name, one), color in zip(named, plots.COLORS, strict=False):
        rows, _, reserved = zip(*one.curve, strict=True)
        axes.plot(rows, [n / bytes_each for n in reserved], marker=".", color=color, label=name)
    axes.axhline(usable / bytes_each, color=plots.GRAY, linestyle="--", label="usable memory")
    shown = f": the {_WHAT_IFS} what-ifs that gain most" if len(what_ifs) > _WHAT_IFS else ""
    axes.set(
        title=f"Peak memory by micro-batch{shown}",
        xlabel="micro-batch (rows)",
        ylabel=f"held by the allocator ({unit})",
        ylim=(0, 1.25 * usable / bytes_each),
        xlim=(0, 1.05 * max(_in_sight(one, 1.25 * usable) for _, one in named)),
    )
    plots.whole_numbers(axes.xaxis)
    plots.tidy(axes)
    plots.legend_beside(axes)


def _in_sight(one: Prediction, top: float) -> int:
    """The first number of rows whose peak is above the top, or the last that was predicted."""
    above = (rows for rows, _, reserved in one.curve if reserved > top)
    return next(above, one.curve[-1][0])


def _draw_step(axes: Any, found: Prediction) -> None:
    categories = sorted({category for _, parts in found.timeline for category in parts})
    most = max(sum(parts.values()) for _, parts in found.timeline)
    unit, bytes_each = plots.memory_unit(most)
    held = [parts for _, parts in found.timeline]
    stacks = [[parts.get(name, 0) / bytes_each for parts in held] for name in categories]
    end = len(held)
    axes.stackplot(range(end), *stacks, labels=categories, colors=plots.COLORS, linewidth=0)
    top = 1.12 * most / bytes_each
    phases = [phase for phase, _ in found.timeline]
    begins = [at for at in range(end) if at == 0 or phases[at] != phases[at - 1]]
    for begin, stop in zip(begins, [*begins[1:], end], strict=True):
        axes.axvline(begin, color=plots.GRAY, linewidth=0.5)
        if stop - begin >= _NARROW * end * len(phases[begin]) / 4:
            axes.text(begin, top, f" {phases[begin]}", va="top", fontsize="x-small")
    axes.set(
        title=f"Memory over one step at batch_size {found.rows}",
        xlabel="operations, in the order in which they run",
        ylabel=f"in tensors ({unit})",
        xlim=(0, max(1, end - 1)),
        ylim=(0, top),
        xticks=[],
    )
    plots.tidy(axes)
    plots.legend_beside(axes, stacked=True)
