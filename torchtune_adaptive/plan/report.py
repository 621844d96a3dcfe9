"""What the user sees of a plan: text, JSON, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.memory_model.gpus import GIB
from torchtune_adaptive.memory_model.peak import Peak
from torchtune_adaptive.plan.predict import Prediction
from torchtune_adaptive.plan.request import PlanRequest


@dataclass(frozen=True)
class WhatIfResult:
    """Of a what-if: what is predicted, or why nothing is."""

    name: str
    answer: Prediction | None
    reason: str = ""


@dataclass(frozen=True)
class PlanReport:
    """All that was found out for a plan."""

    plan: PlanRequest
    found: Prediction
    last_rank: Prediction | None
    """The same on the last rank, where it does not hold the same share of the parameters as the first."""
    outcomes: Sequence[WhatIfResult]
    lengths: Mapping[int, int]
    """The largest micro-batch by row length."""

    @property
    def verdict(self) -> str:
        """On the configured batch size, for whichever rank it looks worse."""
        answers = [self.found, *([self.last_rank] if self.last_rank else [])]
        verdicts = {one.configured.verdict(self.plan.device) for one in answers}
        return next(v for v in ("DOES NOT FIT", "UNCERTAIN", "FITS") if v in verdicts)


def headline_text(plan: PlanRequest, found: Prediction, config: str) -> str:
    """The prediction for what was asked."""
    usable = plan.device.usable
    verdict = found.configured.verdict(plan.device)
    lines = [
        f"{config} on {plan.ranks} rank{'s'[: plan.ranks > 1]} of {plan.device.name}, "
        f"rows of {found.length} tokens ({plan.length_source})",
        "",
        f"batch_size {found.rows}: {verdict}",
        *_peak_lines(found.configured, usable),
    ]
    if found.largest != found.rows and found.at_largest is not None:
        lines += ["", f"batch_size {found.largest}:", *_peak_lines(found.at_largest, usable)]
    lines += ["", _largest_line(found)]
    if found.traced_directly:
        lines.append("Steps of this config are not bilinear, so every size was traced by itself.")
    if plan.assumptions:
        lines += ["", "Assumed:", *(f"  {line}" for line in plan.assumptions)]
    return "\n".join(lines)


def _largest_line(found: Prediction) -> str:
    if not found.largest:
        return f"Not even one row of {found.length} tokens fits."
    power = 1 << (found.largest.bit_length() - 1)
    return f"The largest micro-batch that fits: {found.largest} (power of two: {power})"


def _peak_lines(peak: Peak, usable: int) -> list[str]:
    parts = sorted(peak.parts.items(), key=lambda part: -part[1])
    return [
        f"  peak: {_gib(peak.allocated)} allocated, {_gib(peak.reserved)} reserved, "
        f"of {_gib(usable)}; in {peak.phase}, at {peak.operation or 'its start'}",
        *(f"    {name:<36}{_gib(nbytes):>12}" for name, nbytes in parts if nbytes >= 2**20),
    ]


def details_text(told: PlanReport) -> str:
    """What comes after the first answer, if anything: the last rank; the what-ifs, most rows first."""
    lines = []
    if told.last_rank is not None:
        peak = told.last_rank.configured
        lines.append(
            f"\nParameters cannot be split evenly; that was the first rank. The last one's peak is "
            f"{_gib(peak.allocated)} allocated, {_gib(peak.reserved)} reserved; "
            f"its largest micro-batch is {told.last_rank.largest}."
        )
    if told.outcomes:
        lines += _table(told)
    return "".join(f"{line}\n" for line in lines)


def _table(told: PlanReport) -> list[str]:
    found = told.found
    as_asked = ("as configured", found.largest, found.rows, found.configured)
    rows: list[tuple[str, int, int, Peak]] = [as_asked]
    rows += [
        (one.name, one.answer.largest, one.answer.rows, one.answer.configured)
        for one in told.outcomes
        if one.answer is not None
    ]
    lines = ["", "What if", f"  {'':<32}{'largest':>8}  peak reserved (allocated) at the config's"]
    for name, largest, batch, peak in sorted(rows, key=lambda row: -row[1]):
        lines.append(
            f"  {name:<32}{largest or 'none':>8}  "
            f"{_gib(peak.reserved):>11} ({_gib(peak.allocated)}) at {batch}"
        )
    for length, largest in sorted(told.lengths.items()):
        lines.append(f"  {f'rows of {length} tokens':<32}{largest or 'none':>8}")
    lines += [f"  {one.name:<32}    no answer: {one.reason}" for one in told.outcomes if one.reason]
    return lines


def as_dict(told: PlanReport) -> dict[str, Any]:
    """Everything, for machines."""
    return {
        "verdict": told.verdict,
        "device": asdict(told.plan.device),
        "assumptions": list(told.plan.assumptions),
        "row_length_source": told.plan.length_source,
        **asdict(told.found),
        "last_rank": asdict(told.last_rank) if told.last_rank else None,
        "lengths": dict(told.lengths),
        "what_ifs": [asdict(outcome) for outcome in told.outcomes],
    }


def draw(told: PlanReport, path: Path) -> None:
    """Peak against batch size, and memory over one step.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--plot", str(path), "needs matplotlib", "Install torchtune-adaptive[plot]"
        ) from error
    plan, found = told.plan, told.found
    figure = Figure(figsize=(9, 9), layout="constrained")
    sizes, step = figure.subplots(2, 1)
    named = [
        ("as configured", found),
        *((one.name, one.answer) for one in told.outcomes if one.answer),
    ]
    for name, one in named:
        rows, _, reserved = zip(*one.curve, strict=True)
        sizes.plot(rows, [n / GIB for n in reserved], marker=".", label=name)
    sizes.axhline(plan.device.usable / GIB, color="black", linestyle="--", label="limit")
    sizes.set(
        xlabel="rows in a micro-batch",
        ylabel="peak reserved, GiB",
        ylim=(0, 1.5 * plan.device.usable / GIB),
    )
    sizes.legend(fontsize="small")
    categories = sorted({category for _, parts in found.timeline for category in parts})
    stacks = [[parts.get(name, 0) / GIB for _, parts in found.timeline] for name in categories]
    step.stackplot(range(len(found.timeline)), *stacks, labels=categories, linewidth=0)
    begun = ""
    for at, (phase, _) in enumerate(found.timeline):
        if phase != begun:
            step.axvline(at, color="grey", linewidth=0.5)
            step.text(at, step.get_ylim()[1], f" {phase}", va="top", fontsize="x-small")
            begun = phase
    step.set(xlabel=f"one step of {found.rows} rows, operation by operation", ylabel="live, GiB")
    step.set_xticks([])
    step.legend(fontsize="small", loc="lower right")
    figure.savefig(path)


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB // 10 else f"{nbytes / 2**20:.2f} MiB"
