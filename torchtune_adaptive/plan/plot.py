"""The plot of a plan: peak memory over batch size, memory over one step, speed against memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.memory_model.gpus import GIB
from torchtune_adaptive.plan.fastest_report import draw_fastest
from torchtune_adaptive.plan.predict import Prediction
from torchtune_adaptive.plan.report import PlanReport
from torchtune_adaptive.plots import new_figure


def draw(report: PlanReport, path: Path) -> None:
    """Plot peak memory over batch size, and memory over one step.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = new_figure(9, 13 if report.fastest else 9)
    if figure is None:
        raise ConfigError(
            "--plot", str(path), "needs matplotlib", "Install torchtune-adaptive[plot]"
        )
    sizes, step, *more = figure.subplots(3 if report.fastest else 2, 1)
    _draw_sizes(sizes, report)
    _draw_step(step, report.found)
    if report.fastest is not None:
        draw_fastest(more[0], report.fastest)
    figure.savefig(path)


def _draw_sizes(axes: Any, report: PlanReport) -> None:
    named = [("as configured", report.found)]
    named += [(one.name, one.answer) for one in report.outcomes if one.answer]
    for name, one in named:
        rows, _, reserved = zip(*one.curve, strict=True)
        axes.plot(rows, [n / GIB for n in reserved], marker=".", label=name)
    usable = report.plan.device.usable_bytes / GIB
    axes.axhline(usable, color="black", linestyle="--", label="usable memory")
    axes.set(xlabel="micro-batch", ylabel="peak reserved, GiB", ylim=(0, 1.5 * usable))
    axes.legend(fontsize="small")


def _draw_step(axes: Any, found: Prediction) -> None:
    categories = sorted({category for _, parts in found.timeline for category in parts})
    stacks = [[parts.get(name, 0) / GIB for _, parts in found.timeline] for name in categories]
    axes.stackplot(range(len(found.timeline)), *stacks, labels=categories, linewidth=0)
    current = ""
    for at, (phase, _) in enumerate(found.timeline):
        if phase != current:
            axes.axvline(at, color="grey", linewidth=0.5)
            axes.text(at, axes.get_ylim()[1], f" {phase}", va="top", fontsize="x-small")
            current = phase
    axes.set(xlabel=f"one step at batch_size {found.rows}, by operation", ylabel="in tensors, GiB")
    axes.set_xticks([])
    axes.legend(fontsize="small", loc="lower right")
