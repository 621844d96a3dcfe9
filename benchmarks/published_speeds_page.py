"""The page that shows predicted speeds beside published ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from comparing import rank_correlation
from published_rows import FMS, FMS_BF16, FMS_LATER

_HEAD = """# Published throughputs of transformers' Trainer

Runs of fms-acceleration's benchmarks on A100-80, the same as of [published peaks](published.md), and the
speeds that the planner says they have: {versions} here, no GPU. Runs with fused kernels are planned with
Liger's kernels that do the same (norms, rotations, loss), others with transformers' own. Predictions were
committed before the published numbers, and nothing is fitted to them. The numbers of PowerLM-3b's first
table, full and LoRA, and those of Llama had been read before; others had not. One fault had been found by
those that had been read: products in float32 with few terms were predicted too slow.

    python benchmarks/published_speeds.py --predict  # the predictions, which published_speeds.json keeps
    python benchmarks/published_speeds.py            # this page

**Of {count} runs, {fit} fit by their plans: half of the speeds are within {median} %, the worst is off by
{worst} %.** {slower} are predicted too fast, and {inside} are within the band that a plan prints. Of the
{unseen} that had not been read, half are within {median_unseen} %. Plans say of the other {edge} that they
do not fit. They ran, and are predicted {least_edge} to {most_edge} % too fast: where memory is short, torch
gives back what it holds within a step, which is not in the prediction.
"""
_MISSED = """
## What was missed, and why

- **Nearly all runs are slower than predicted**, with fused kernels by less than with transformers' own.
  This is the [bias of all speeds](speed_anchors.md), and its cause is not known.
- **LoRA on 2 GPUs, with few rows, is far slower than predicted.** These runs had FSDP1, for which the
  Trainer takes PEFT's policy: it gathers each adapter by itself. FSDP2 is planned, which gathers layers.
  That this is the cause was not measured.
- **LoRA in float32, without mixed precision, is faster than predicted.** The gradients of an adapter are
  products with few results and many terms. A plan leaves most multiprocessors idle in them; cuBLAS may
  divide the terms among them.
- The first table's LoRA on one GPU was described without bf16, and its scenarios ask for it. With it, the
  two runs are at the end of the list.

No prediction is here for LoRA and QLoRA with fused kernels, and for GPTQ.
"""


class Compared(NamedTuple):
    table: str
    row: str
    published: float
    predicted: int
    band: tuple[float, float]
    fits: bool

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def is_inside(self) -> bool:
        low, high = self.band
        return low <= self.published / self.predicted - 1 <= high

    @property
    def group(self) -> str:
        """Runs of a model and a method."""
        return f"{self.row.partition(',')[0]}{' (18 October)' * (self.table == FMS_LATER)}"

    @property
    def was_read(self) -> bool:
        """Whether its number had been read before it was described."""
        return self.table == FMS and "Mistral" not in self.row and "QLoRA" not in self.row


def compared(
    rows: Iterable[Mapping[str, Any]], throughputs: Mapping[str, Mapping[str, float]]
) -> list[Compared]:
    """The rows of runs that ended."""
    return [
        Compared(
            one["table"],
            one["row"],
            throughputs[one["table"]][one["row"]],
            one["predicted"],
            tuple(one["band"]),
            one["fits"],
        )
        for one in rows
        if one["row"] in throughputs[one["table"]]
    ]


def page(result: Mapping[str, Any], throughputs: Mapping[str, Mapping[str, float]]) -> str:
    """The whole page."""
    every = compared(result["rows"], throughputs)
    counted = [one for one in every if one.table != FMS_BF16]
    fit = [one for one in counted if one.fits]
    edge = [one for one in counted if not one.fits]
    unseen = [one for one in fit if not one.was_read]
    head = _HEAD.format(
        versions=result["versions"],
        count=len(counted),
        fit=len(fit),
        median=_median(fit),
        worst=f"{100 * max(abs(one.error) for one in fit):.0f}",
        slower=sum(one.error > 0 for one in fit),
        inside=sum(one.is_inside for one in fit),
        unseen=len(unseen),
        median_unseen=_median(unseen),
        edge=len(edge),
        least_edge=f"{100 * min(one.error for one in edge):.0f}",
        most_edge=f"{100 * max(one.error for one in edge):.0f}",
    )
    lines = [
        head,
        "| runs | speeds | median error | worst | rank correlation |",
        "|---|--:|--:|--:|--:|",
    ]
    lines += [_summary(name, [one for one in fit if one.group == name]) for name in _groups(fit)]
    lines += [
        _MISSED,
        "## The runs\n",
        "| run | published | predicted | error | |",
        "|---|--:|--:|--:|---|",
    ]
    lines += map(_line, every)
    return "\n".join(lines) + "\n"


def _groups(rows: Sequence[Compared]) -> list[str]:
    return [*dict.fromkeys(one.group for one in rows)]


def _median(rows: Sequence[Compared]) -> str:
    return f"{100 * median(abs(one.error) for one in rows):.1f}"


def _summary(name: str, rows: Sequence[Compared]) -> str:
    speeds = [one.published for one in rows], [float(one.predicted) for one in rows]
    ranks = f"{rank_correlation(*speeds):.2f}"
    worst = max((one.error for one in rows), key=abs)
    return f"| {name} | {len(rows)} | {_median(rows)} % | {100 * worst:+.1f} % | {ranks} |"


def _line(one: Compared) -> str:
    notes = {
        "does not fit, by its plan": not one.fits,
        "described as bf16, after its number had been read": one.table == FMS_BF16,
        "18 October": one.table == FMS_LATER,
        "outside the band": not one.is_inside,
    }
    note = "; ".join(text for text, holds in notes.items() if holds)
    speeds = f"{one.published:,.0f} | {one.predicted:,.0f}"
    return f"| {one.row} | {speeds} | {100 * one.error:+.1f} % | {note} |"
