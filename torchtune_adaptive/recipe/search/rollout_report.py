"""What the searches for the sizes of phases report, where rows are generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import Block, Drawing, counted, plots
from torchtune_adaptive.core import Budget, strategies
from torchtune_adaptive.recipe.search import drawn
from torchtune_adaptive.recipe.search.in_tokens import FoundBudget
from torchtune_adaptive.recipe.search.report import (
    Report,
    batch_numbers,
    reason,
    rows_by_length,
    table_of,
)
from torchtune_adaptive.recipe.search.sizing import FoundRows
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.knob_table import ACCUMULATION
from torchtune_adaptive.recipe.settings.phase_names import GENERATION, PHASES, SCORING, TRAINING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IN_ROWS = {GENERATION: f"{BLOCK}.generation_batch_size", SCORING: f"{BLOCK}.scoring_batch_size"}
"""The keys of sizes in rows; training has ``gradient_accumulation_steps``."""
Sizes = dict[str, int | Budget]
"""By phase, the rows in a micro-batch, or its token budget."""
IN_TOKENS = {TRAINING: f"{BLOCK}.token_budget", SCORING: f"{BLOCK}.scoring_token_budget"}


@dataclass(frozen=True)
class RolloutSizesReport(Report):
    """What the searches of all phases have found."""

    name: ClassVar[str] = "batch_size_search"
    found: Mapping[str, FoundRows | FoundBudget]
    sizes: Sizes
    """Those of all phases, as they were found, or as the config says."""
    row: str
    """What trials were made of."""
    device: str
    headroom: float
    seconds: float

    @property
    def reasons(self) -> dict[str, str]:
        """By phase, why its size was found."""
        return {phase: _reason(found) for phase, found in self.found.items()}

    def text(self) -> str:
        lines = [
            f"Searched with rows of {self.row} on {self.device}, {self.headroom:.0%} headroom, "
            f"{self.seconds:.1f} s:"
        ]
        for phase in PHASES:
            why = self.reasons.get(phase, "as the config says")
            lines.append(f"{phase} in micro-batches of {in_words(self.sizes[phase])} ({why})")
        return "\n".join(
            [*lines, self.batch_unchanged(not isinstance(self.sizes[TRAINING], Budget))]
        )

    def overrides(self) -> str:
        said = []
        for phase, size in self.sizes.items():
            if isinstance(size, Budget):
                said.append(f"{IN_TOKENS[phase]}={size.tokens}")
            elif phase in IN_ROWS:
                said.append(f"{IN_ROWS[phase]}={size}")
            else:
                said.append(f"{ACCUMULATION}={self.split.accumulation}")
        return f"{' '.join(said)} use_maximum_batch_size=False"

    def applied_to(self, cfg: DictConfig) -> DictConfig:
        for phase, key in IN_ROWS.items():
            if isinstance(self.sizes[phase], int):
                OmegaConf.update(cfg, key, self.sizes[phase], force_add=True)
        return cfg

    def numbers(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for phase, size in self.sizes.items():
            if isinstance(size, Budget):
                found[f"{phase}_token_budget"] = size.tokens
            else:
                found[f"{phase}_batch_size"] = size
        if not isinstance(self.sizes[TRAINING], Budget):
            found[ACCUMULATION] = self.split.accumulation
        trials = sum(len(result.trials) for result in self.found.values())
        return {**found, "trials": trials, "seconds": round(self.seconds, 3)}

    def as_dict(self) -> dict[str, Any]:
        budgets = {phase: size for phase, size in self.sizes.items() if isinstance(size, Budget)}
        return {
            **batch_numbers(self.split),
            **self.numbers(),
            "overrides": self.overrides(),
            "row": self.row,
            "device": self.device,
            "headroom": self.headroom,
            "rows_by_length": {phase: dict(size.measured) for phase, size in budgets.items()},
            "reasons": self.reasons,
            "trials": {
                phase: [trial.as_dict() for trial in result.trials]
                for phase, result in self.found.items()
            },
        }

    def details(self) -> list[Block]:
        tables = [table_of(each.trials, phase.capitalize()) for phase, each in self.found.items()]
        return [Drawing(self.figure()), *tables]

    def figure(self) -> Figure | None:
        """The search of each phase, one below the other."""
        figure = plots.new_figure(6.4, 3.4 * len(self.found))
        if figure is None:
            return None
        stacked = figure.subplots(len(self.found), 1, squeeze=False)[:, 0]
        for (phase, found), axes in zip(self.found.items(), stacked, strict=True):
            if isinstance(found, FoundBudget):
                drawn.rows_by_length(axes, found.size, found.trials)
            else:
                drawn.memory_by_rows(axes, found, f"rows of {self.row}", self.headroom)
            axes.set(title=f"{phase.capitalize()}: micro-batches of {in_words(self.sizes[phase])}")
        plots.legend_below(figure, columns=3)
        return figure


def _reason(found: FoundRows | FoundBudget) -> str:
    if isinstance(found, FoundBudget):
        return f"rows that fit, by length: {rows_by_length(found.size)}"
    limit = f"there are no more rows, or {BLOCK}.ceiling no larger size"
    return reason(found, limit=limit if found.status is strategies.Status.CEILING else None)


def in_words(size: int | Budget) -> str:
    """The size of a micro-batch."""
    return f"{size.tokens:,} tokens" if isinstance(size, Budget) else counted(size, "row")
