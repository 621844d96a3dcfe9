"""What the plan command prints and draws: text, JSON, a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.memory_model.gpus import GIB, MIB
from torchtune_adaptive.memory_model.peak import Peak
from torchtune_adaptive.plan.predict import Prediction
from torchtune_adaptive.plan.request import PlanRequest
from torchtune_adaptive.plots import new_figure
from torchtune_adaptive.text import bytes_of, human_bytes, table

_WHERE = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "between steps": "between steps",
}


@dataclass(frozen=True)
class WhatIfResult:
    """The prediction for a what-if, or why there is none."""

    name: str
    answer: Prediction | None
    reason: str = ""


@dataclass(frozen=True)
class PlanReport:
    """Everything the plan command reports."""

    plan: PlanRequest
    found: Prediction
    last_rank: Prediction | None
    """The prediction for the last rank, if its share of the parameters differs from the first rank's."""
    outcomes: Sequence[WhatIfResult]
    lengths: Mapping[int, int]
    """The largest micro-batch by row length."""

    @property
    def verdict(self) -> str:
        """For the configured batch size, on the rank where it is worse."""
        answers = [self.found, *([self.last_rank] if self.last_rank else [])]
        verdicts = {one.configured.verdict(self.plan.device) for one in answers}
        return next(v for v in ("DOES NOT FIT", "UNCERTAIN", "FITS") if v in verdicts)


def headline_text(plan: PlanRequest, found: Prediction, config: str) -> str:
    """The prediction for the config as it is."""
    limit = plan.device.limit
    devices = f"{plan.ranks}{' x' * (plan.ranks > 1)} {plan.device.name}"
    verdict = found.configured.verdict(plan.device)
    lines = [
        f"{config} on {devices}, samples of {found.length} tokens ({plan.length_source})",
        "",
        f"batch_size {found.rows}: {verdict}. {_peak_text(found.configured, limit)}",
        *_parts(found.configured),
    ]
    if found.largest != found.rows and found.at_largest is not None:
        text = _peak_text(found.at_largest, limit)
        lines += ["", f"batch_size {found.largest}: {text}", *_parts(found.at_largest)]
    lines += ["", _largest_text(found)]
    if found.traced_directly:
        lines.append(
            "Memory did not scale as expected for this config, so every size was traced separately "
            "(slower, equally reliable)."
        )
    if plan.assumptions:
        lines += ["", "Assumptions:", *(f"  {line}" for line in plan.assumptions)]
    return "\n".join(lines)


def _largest_text(found: Prediction) -> str:
    if not found.largest:
        return f"Not even one sample of {found.length} tokens fits."
    power = 1 << (found.largest.bit_length() - 1)
    return f"Largest micro-batch that fits: {found.largest} (power of two: {power})"


def _peak_text(peak: Peak, limit: int) -> str:
    tensors = ""
    if peak.reserved != peak.allocated:
        tensors = f" ({human_bytes(peak.allocated)} in tensors; the rest is allocator overhead)"
    where = _WHERE.get(peak.phase, f"in the {peak.phase}")
    return f"Peak {bytes_of(peak.reserved, limit)}{tensors}, reached {where}."


def _parts(peak: Peak) -> list[str]:
    parts = sorted(peak.parts.items(), key=lambda part: -part[1])
    return [f"    {name:<36}{human_bytes(n):>12}" for name, n in parts if n >= MIB]


def details_text(report: PlanReport) -> str:
    """What follows the headline, if anything: the last rank; the what-ifs, largest micro-batch first."""
    lines = []
    if report.last_rank is not None:
        peak = report.last_rank.configured
        lines.append(
            "Parameters do not divide evenly across ranks; the numbers above are for the first rank. "
            f"The last rank's peak is {human_bytes(peak.reserved)} reserved "
            f"({human_bytes(peak.allocated)} allocated); its largest micro-batch is "
            f"{report.last_rank.largest}."
        )
    if report.outcomes:
        lines += ["", *_what_if_table(report)]
    return "".join(f"{line}\n" for line in lines)


def _what_if_table(report: PlanReport) -> list[str]:
    predicted = [("as configured", report.found)]
    predicted += [(one.name, one.answer) for one in report.outcomes if one.answer is not None]
    predicted.sort(key=lambda row: -row[1].largest)
    rows = [
        (name, str(one.largest or "none"), _peak_cell(one.configured)) for name, one in predicted
    ]
    for length, largest in sorted(report.lengths.items()):
        rows.append((f"samples of {length} tokens", str(largest or "none"), ""))
    peak = f"peak at batch_size {report.found.rows}: reserved (allocated)"
    return [
        *table(("what if", "largest", peak), rows, right={1}),
        *(f"  {one.name}: no prediction. {one.reason}" for one in report.outcomes if one.reason),
    ]


def _peak_cell(peak: Peak) -> str:
    return f"{human_bytes(peak.reserved)} ({human_bytes(peak.allocated)})"


def as_dict(report: PlanReport) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "verdict": report.verdict,
        "device": asdict(report.plan.device),
        "assumptions": list(report.plan.assumptions),
        "row_length_source": report.plan.length_source,
        **asdict(report.found),
        "last_rank": asdict(report.last_rank) if report.last_rank else None,
        "lengths": dict(report.lengths),
        "what_ifs": [asdict(outcome) for outcome in report.outcomes],
    }


def draw(report: PlanReport, path: Path) -> None:
    """Plot peak memory over batch size, and memory over one step.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = new_figure(9, 9)
    if figure is None:
        raise ConfigError(
            "--plot", str(path), "needs matplotlib", "Install torchtune-adaptive[plot]"
        )
    sizes, step = figure.subplots(2, 1)
    _draw_sizes(sizes, report)
    _draw_step(step, report.found)
    figure.savefig(path)


def _draw_sizes(axes: Any, report: PlanReport) -> None:
    named = [("as configured", report.found)]
    named += [(one.name, one.answer) for one in report.outcomes if one.answer]
    for name, one in named:
        rows, _, reserved = zip(*one.curve, strict=True)
        axes.plot(rows, [n / GIB for n in reserved], marker=".", label=name)
    limit = report.plan.device.limit / GIB
    axes.axhline(limit, color="black", linestyle="--", label="limit")
    axes.set(xlabel="micro-batch", ylabel="peak reserved, GiB", ylim=(0, 1.5 * limit))
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
