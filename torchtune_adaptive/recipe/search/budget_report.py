"""What the search for a token budget reports: its trials, the budget, and the padding and speed it gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import Block, Drawing, counted, plots
from torchtune_adaptive.core import Budget, ByRows, ByTokens, MicroBatches, SampleOrder, Split
from torchtune_adaptive.recipe.search import drawn
from torchtune_adaptive.recipe.search.in_tokens import LengthTrial
from torchtune_adaptive.recipe.search.report import Report, rows_by_length, table_of
from torchtune_adaptive.recipe.settings.adaptive import BLOCK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STEPS_COMPARED = 20
"""Steps over which padding is counted; each packs the rows of all ranks."""


@dataclass(frozen=True)
class Throughput:
    """How fast one way of dividing a step into micro-batches is."""

    padding_share: float
    tokens_per_second: float | None = None
    """Real ones, on each rank, in one step; None if it was not measured, or does not fit."""


@dataclass(frozen=True)
class BudgetReport(Report):
    """A budget that was found, and what it changes; ``split`` is the batch without it.

    There are no overrides: a budget that is given is tried as well.
    """

    name: ClassVar[str] = "token_budget"
    micro_batches: ByTokens
    trials: Sequence[LengthTrial]
    without_budget: Throughput
    with_budget: Throughput
    used: bool
    """Whether training keeps to it; not if it is slower."""

    @property
    def budget(self) -> Budget:
        return self.micro_batches.budget

    def text(self) -> str:
        configured = counted(self.split.micro_batch, "row")
        lines = [
            f"Rows that fit, by length: {rows_by_length(self.budget)}.",
            f"Padding: {self.without_budget.padding_share:.0%} of what is computed in micro-batches of "
            f"{configured}, {self.with_budget.padding_share:.0%} with the token budget.",
        ]
        before, after = self.without_budget.tokens_per_second, self.with_budget.tokens_per_second
        if after is not None:
            was = f"{before:,.0f}" if before else "(does not fit)"
            lines.append(f"Tokens per second on each rank, in one step: {was} -> {after:,.0f}.")
        longest = self.budget.longest
        if not self.used:
            lines.append(
                f"The token budget is not used, because it is slower: micro-batches stay at {configured}. "
                f"({BLOCK}.token_budget={self.budget.tokens} uses one in any case.)"
            )
        elif (at_most := self.budget.rows(longest)) < self.split.micro_batch:
            lines.append(
                f"The token budget is used: without it, micro-batches of {configured} would run out of "
                f"memory where rows are long ({at_most} of {longest} tokens fit)."
            )
        if self.validation is not None:
            lines.append(f"Validation in micro-batches of {self.validation.size}.")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows_by_length": {length: rows for length, rows in self.budget.measured},
            "used": self.used,
            "batch_size_without": self.split.micro_batch,
            "without_budget": asdict(self.without_budget),
            "with_budget": asdict(self.with_budget),
            "validation": self.validation.as_dict() if self.validation else None,
            "trials": [each.as_dict() for each in self.trials],
        }

    def applied_to(self, cfg: DictConfig) -> DictConfig:
        if not self.used:
            OmegaConf.update(cfg, f"{BLOCK}.token_budget", False, force_add=True)
        return cfg

    def numbers(self) -> dict[str, float]:
        found: dict[str, float] = {
            "token_budget": self.budget.tokens,
            "token_budget_used": int(self.used),
            "trials": len(self.trials),
        }
        for name, how in (("without", self.without_budget), ("with", self.with_budget)):
            found[f"padding_share_{name}_budget"] = round(how.padding_share, 4)
            if how.tokens_per_second is not None:
                key = f"tokens_per_second_per_gpu_{name}_budget"
                found[key] = round(how.tokens_per_second, 1)
        return found

    def details(self) -> list[Block]:
        return [Drawing(self.figure()), table_of(self.trials)]

    def figure(self) -> Figure | None:
        """Rows over length: what fits, what was tried."""
        figure = plots.new_figure(6.4, 4)
        if figure is None:
            return None
        axes = figure.subplots()
        drawn.rows_by_length(axes, self.budget, self.trials)
        configured = self.split.micro_batch
        axes.axhline(
            configured,
            color=plots.GRAY,
            linestyle="--",
            label=f"without: {counted(configured, 'row')}",
        )
        axes.set(title="Token budget" + ("" if self.used else " (slower, so not used)"))
        plots.legend_below(figure)
        return figure


def padding_shares(by_tokens: ByTokens, split: Split) -> tuple[float, float]:
    """The share of padding without a budget and with it, over a number of shuffled steps."""
    lengths, rows = by_tokens.row_lengths, split.global_batch
    order = SampleOrder.to_look_at(len(lengths)).epoch(0)
    begins = range(0, len(order) - rows + 1, rows)[:_STEPS_COMPARED]
    steps = [order[begin : begin + rows].tolist() for begin in begins]

    def share(micro_batches: MicroBatches) -> float:
        size = micro_batches.full_size(split)
        tokens = computed = 0
        for step in steps:
            for samples in micro_batches.of_all_ranks(step, size, split.ranks):
                of_rows = lengths[samples].tolist()
                tokens += sum(of_rows)
                computed += len(of_rows) * max(of_rows)
        return 1 - tokens / computed if computed else 0.0

    return share(ByRows("none")), share(by_tokens)
