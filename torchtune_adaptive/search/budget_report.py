"""What the search for a token budget reports: its trials, the budget, and the padding and speed it gains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torchtune_adaptive.batching.packing import Budget, padding
from torchtune_adaptive.batching.split import Split
from torchtune_adaptive.data.micro_batches import ByRows, ByTokens, MicroBatches
from torchtune_adaptive.plots import new_figure
from torchtune_adaptive.search.trial import LengthTrial, SizeTrial
from torchtune_adaptive.text import table

JSON_NAME = "token_budget.json"
PLOT_NAME = "token_budget.png"
_STEPS_COMPARED = 200


@dataclass(frozen=True)
class Throughput:
    """How fast one way of dividing a step into micro-batches is."""

    padding_share: float
    tokens_per_second: float | None = None
    """Real ones, on each rank, in one step; None if it was not measured, or does not fit."""


@dataclass(frozen=True)
class BudgetReport:
    """A budget that was found, and what it changes."""

    micro_batches: ByTokens
    trials: Sequence[LengthTrial]
    split: Split
    """The batch without it."""
    without_budget: Throughput
    with_budget: Throughput

    @property
    def budget(self) -> Budget:
        return self.micro_batches.budget

    def text(self) -> str:
        rows = [
            (str(each.length), *cells) for each in self.trials for cells in [_cells(each.trial)]
        ]
        fits = ", ".join(f"{rows} x {length}" for length, rows in self.budget.measured)
        lines = [
            *table(("length", "rows", "peak", "usable", "verdict", "deciding rank"), rows),
            f"Rows that fit, by length: {fits}.",
            f"Padding: {self.without_budget.padding_share:.0%} of what is computed in micro-batches of "
            f"{self.split.micro_batch} rows, {self.with_budget.padding_share:.0%} with the token budget.",
        ]
        before, after = self.without_budget.tokens_per_second, self.with_budget.tokens_per_second
        if after is not None:
            was = f"{before:,.0f}" if before else "(does not fit)"
            lines.append(f"Tokens per second on each rank, in one step: {was} -> {after:,.0f}.")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows_by_length": {length: rows for length, rows in self.budget.measured},
            "batch_size_without": self.split.micro_batch,
            "without_budget": asdict(self.without_budget),
            "with_budget": asdict(self.with_budget),
            "trials": [{"length": each.length, **each.trial.as_dict()} for each in self.trials],
        }

    def write(self, folder: Path) -> list[Path]:
        """The JSON file and, where matplotlib is installed, the plot; the paths of what was written."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / JSON_NAME
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        drawn = _plot(self.budget, self.trials, folder / PLOT_NAME)
        return [path, drawn] if drawn else [path]


def padding_shares(by_tokens: ByTokens, split: Split) -> tuple[float, float]:
    """The share of padding without a budget and with it, over a number of shuffled steps."""
    lengths = by_tokens.row_lengths
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0)).tolist()
    rows = split.global_batch
    steps = [order[i : i + rows] for i in range(0, len(order) - rows + 1, rows)][:_STEPS_COMPARED]

    def share(micro_batches: MicroBatches) -> float:
        size = micro_batches.full_size(split)
        portions = (
            portion
            for step in steps
            for rank in range(split.ranks)
            for portion in micro_batches.portions(step, size, rank, split.ranks)
        )
        return padding(
            (lengths[sample] for sample in portion.sample_ids)
            for portion in portions
            if not portion.weightless
        )

    return share(ByRows("none")), share(by_tokens)


def _cells(trial: SizeTrial) -> tuple[str, ...]:
    decided = trial.deciding
    return (
        str(trial.size),
        f"{decided.peak_bytes:,}",
        f"{decided.usable_bytes:,}",
        decided.trouble or "fits",
        str(trial.deciding_rank),
    )


def _plot(budget: Budget, trials: Sequence[LengthTrial], path: Path) -> Path | None:
    """Rows over length: what fits, what was tried; where matplotlib is installed."""
    figure = new_figure(7, 4)
    if figure is None:
        return None
    axes = figure.subplots()
    shortest = min(length for length, _ in budget.measured)
    lengths = range(max(1, shortest // 2), budget.longest + 1)
    axes.step(lengths, [budget.rows(length) for length in lengths], label="budget", where="mid")
    for fits, marker, label in ((True, "o", "fits"), (False, "x", "does not fit")):
        tried = [each for each in trials if each.trial.fits is fits]
        axes.plot(
            [each.length for each in tried],
            [each.trial.size for each in tried],
            marker,
            label=label,
        )
    axes.set(xlabel="tokens in the longest row", ylabel="rows in a micro-batch", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
