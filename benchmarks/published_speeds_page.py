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
Liger's kernels that do the same (norms, rotations, loss), others with transformers' own. Nothing is fitted
to the published numbers. The numbers of PowerLM-3b's first table, full and LoRA, and those of Llama had been
read before the first predictions; others had not. One fault had been found by those that had been read:
products in float32 with few terms were predicted too slow.

The first predictions were committed before the published numbers: half of 44 that fit were within 11.7 %.
These are of the planner of today. What has changed since was found elsewhere: what a trainer reserves, by
which five more do not fit, and what [the host](fsdp_host.md), caches and links take.

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
  This is the [bias of all speeds](speed_anchors.md); [what it is not](#where-the-time-is-missed) is below.
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

_PARTS = """
## Where the time is missed

Two runs that differ in nothing but their rows say what a further row takes, and what else a step takes: the
optimizer, collectives that nothing hides, and the host. These are the runs with the fewest and the most rows
that fit:

| runs | GPUs | s for a row, published | predicted | error | s for the rest, published | predicted |
|---|--:|--:|--:|--:|--:|--:|
"""
_CAUSE = """
In full fine-tuning a row takes {least} to {most} % longer than predicted: {alone} % in the median of one GPU,
{together} % of several. So most of the bias is in kernels of the forward and the backward pass, and not in
collectives or in the host. On one GPU the difference is {small} ms for each row in the model of 3 billion
parameters, and {large_least} to {large_most} ms in those of 7 and 8: it does not grow with the model, as
matrix products do. Which kernels it is in is not known.

The rest of a step takes {more} s more than predicted on one GPU, and {more_together} s more on several, where
FSDP1 ran and FSDP2 is planned.
"""
_LENGTH = 4096
"""Tokens in a row."""


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
    def shape(self) -> tuple[int, int]:
        """GPUs, and rows of each in a micro-batch."""
        gpus, rows = self.row.rpartition(", ")[2].split(" x ")
        return int(gpus), int(rows)

    def seconds(self, speed: float) -> float:
        """The seconds of a step at a speed."""
        return self.shape[1] * _LENGTH / speed

    @property
    def was_read(self) -> bool:
        """Whether its number had been read before it was described."""
        return self.table == FMS and "Mistral" not in self.row and "QLoRA" not in self.row


class Parts(NamedTuple):
    """What a further row takes, and the rest of a step, in seconds."""

    row: float
    rest: float

    @classmethod
    def of(cls, rows: tuple[int, int], seconds: tuple[float, float]) -> Parts:
        each = (seconds[1] - seconds[0]) / (rows[1] - rows[0])
        return cls(each, seconds[0] - rows[0] * each)


class PartsCompared(NamedTuple):
    name: str
    gpus: int
    published: Parts
    predicted: Parts

    @property
    def longer(self) -> float:
        """The share by which a row takes longer than predicted."""
        return self.published.row / self.predicted.row - 1

    @property
    def error(self) -> float:
        """The error of a row's predicted seconds."""
        return self.predicted.row / self.published.row - 1

    @property
    def more(self) -> float:
        """The seconds by which the rest takes longer."""
        return self.published.rest - self.predicted.rest


def parts_of(rows: Sequence[Compared]) -> list[PartsCompared]:
    """The parts of steps that ran with several micro-batches."""
    alike: dict[tuple[str, int], list[Compared]] = {}
    for one in rows:
        name, later = one.row.rpartition(", ")[0], " (18 October)" * (one.table == FMS_LATER)
        alike.setdefault((name + later, one.shape[0]), []).append(one)
    found = []
    for (name, gpus), runs in alike.items():
        few, many = (pick(runs, key=lambda run: run.shape[1]) for pick in (min, max))
        if few is not many:
            sizes = few.shape[1], many.shape[1]
            said = few.seconds(few.published), many.seconds(many.published)
            predicted = few.seconds(few.predicted), many.seconds(many.predicted)
            found.append(
                PartsCompared(name, gpus, Parts.of(sizes, said), Parts.of(sizes, predicted))
            )
    return found


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
    lines += [_MISSED.rstrip("\n"), *_by_parts(parts_of(fit))]
    lines += [
        "## The runs\n",
        "| run | published | predicted | error | |",
        "|---|--:|--:|--:|---|",
    ]
    lines += map(_line, every)
    return "\n".join(lines) + "\n"


def _by_parts(parts: Sequence[PartsCompared]) -> list[str]:
    """Where the time is missed."""
    lines = [
        f"| {one.name} | {one.gpus} | {one.published.row:.3f} | {one.predicted.row:.3f} | "
        f"{100 * one.error:+.1f} % | {one.published.rest:.2f} | {one.predicted.rest:.2f} |"
        for one in parts
    ]
    full = [one for one in parts if " full" in one.name]
    alone = [one for one in full if one.gpus == 1]
    together = [one for one in full if one.gpus > 1]
    small, large = [], []
    for one in alone:
        difference = 1000 * (one.published.row - one.predicted.row)
        (small if "3b" in one.name else large).append(difference)
    cause = _CAUSE.format(
        least=f"{100 * min(one.longer for one in full):.0f}",
        most=f"{100 * max(one.longer for one in full):.0f}",
        alone=f"{100 * median(one.longer for one in alone):.0f}",
        together=f"{100 * median(one.longer for one in together):.0f}",
        small=f"{median(small):.0f}",
        large_least=f"{min(large):.0f}",
        large_most=f"{max(large):.0f}",
        more=f"{median(one.more for one in alone):.2f}",
        more_together=f"{median(one.more for one in together):.2f}",
    )
    return [_PARTS.rstrip("\n"), *lines, cause]


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
