"""What choosing the fastest configuration reports: what was tried, what changes, what to paste."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import Block, Table, bytes_of
from torchtune_adaptive.core import Choice, SizeTrial
from torchtune_adaptive.recipe.search.report import Report, numbers_of
from torchtune_adaptive.recipe.search.timings import Timing
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.knob_table import changes, overrides, with_choice


def name_of(choice: Choice, own: Choice) -> str:
    """A choice by what it changes in the config's own."""
    changed = (f"{change.key}={change.new}" for change in changes(own, choice))
    return ", ".join(changed) or "as configured"


@dataclass(frozen=True)
class FastestReport(Report):
    """The configuration that was chosen, and why."""

    name: ClassVar[str] = "fastest_configuration"
    use_of_overrides: ClassVar[str] = "To use this configuration again"
    asked: Asked
    ranks: int
    own: Choice
    chosen: Choice
    timed: Sequence[Timing[Choice]]
    """The config's own values first, if they fit."""
    tried: Mapping[Choice, SizeTrial]
    tokens: int
    """Tokens in a step that was timed, over all ranks."""
    row_length: int
    row_source: str
    device: str
    headroom: float
    seconds: float

    def overrides(self) -> str:
        changed = with_choice(self.asked, self.ranks, self.chosen)
        # Of whatever config they are put to: a search for the batch would find another.
        off = ("use_maximum_batch_size=False", "use_fastest_configuration=False")
        return " ".join([*overrides(self.asked.cfg, changed.cfg), *off])

    def applied_to(self, cfg: DictConfig) -> DictConfig:
        found = with_choice(replace(self.asked, cfg=cfg), self.ranks, self.chosen).cfg
        # So that it trains the same when it is run again: timing might choose another.
        found.use_maximum_batch_size = found.use_fastest_configuration = False
        if OmegaConf.select(found, f"{BLOCK}.search_only"):
            found[BLOCK].search_only = False  # there is nothing to search for any more
        return found

    def _speed(self, seconds: float | None) -> float | None:
        """Tokens per second and rank."""
        return self.tokens / self.ranks / seconds if seconds else None

    def _cells(self, each: Timing[Choice]) -> tuple[str, ...]:
        """A configuration: its name, speed and steps as measured, its speed beside that of the first as
        predicted, its peak, and why it was not chosen."""
        speed, first = self._speed(each.measured), self.timed[0].predicted
        peak = ""
        if (trial := self.tried.get(each.way)) is not None:
            peak = bytes_of(trial.deciding.peak_bytes, trial.deciding.usable_bytes)
        return (
            name_of(each.way, self.own),
            f"{speed:,.0f}" if speed else "",
            str(len(each.steps)) if each.steps else "",
            f"{first / each.predicted:.2f} x" if first and each.predicted else "",
            peak,
            self._verdict(each),
        )

    @property
    def _best(self) -> Timing[Choice]:
        """The timing of what was chosen."""
        return next(each for each in self.timed if each.way == self.chosen)

    def _verdict(self, each: Timing[Choice]) -> str:
        """Why a configuration was not chosen, beside the one that was and in the same steps."""
        if each.way == self.chosen:
            return "chosen"
        if each.failed:
            return "ran out of memory when it was timed"
        steps, best = len(each.steps), self._best
        mine, its = each.measured, best.in_the_first(steps)
        if mine is None or its is None:
            return ""
        why = ""
        if mine < its:
            predicted_slower = (each.predicted or 0) > (best.predicted or 0)
            why = "but predicted slower" if predicted_slower else "but others were faster then"
        if steps == len(best.steps):
            return f"as fast within noise, {why}" if why else "slower"
        beside = f"out after {steps} steps, in which the chosen one had {self._speed(its):,.0f}"
        return f"{beside}: as fast within noise, {why}" if why else beside

    def _doubt(self) -> list[str]:
        """A line where steps of one configuration vary more than the closest two configurations differ."""
        leads = []
        for each in self.timed:
            if each.way == self.chosen or each.failed or not each.measured:
                continue
            if its := self._best.in_the_first(len(each.steps)):
                leads.append(abs(each.measured / its - 1))
        spread, lead = max(each.spread for each in self.timed), min(leads, default=math.inf)
        if spread <= lead:
            return []
        return [
            f"Steps of one configuration vary by {spread:.0%} (quartiles), and the closest two differ by "
            f"{lead:.0%}: this timing alone does not tell them apart."
        ]

    def text(self) -> str:
        lines = [
            f"Timed steps of the data's first rows on {self.device}; {self.row_length} tokens a row fit "
            f"({self.row_source}), {self.headroom:.0%} headroom; {self.seconds:.1f} s:"
        ]
        for each in self.timed:
            name, measured, steps, predicted, peak, verdict = self._cells(each)
            mark = "*" if each.way == self.chosen else " "
            parts = [f"{measured} tokens/s per rank in {steps} steps" if measured else "not timed"]
            parts += [f"predicted {predicted}"] if predicted else []
            parts += [f"peak {peak}"] if peak else []
            lines.append(f"{mark} {name}: {', '.join(parts)}; {verdict}".removesuffix("; "))
        changed = [str(change) for change in changes(self.own, self.chosen)]
        lines += changed or ["The config's own values stay."]
        return "\n".join([*lines, *self._doubt(), self.batch_unchanged()])

    def as_dict(self) -> dict[str, Any]:
        return {
            "chosen": dict(self.chosen),
            "changes": [asdict(change) for change in changes(self.own, self.chosen)],
            "overrides": self.overrides(),
            "global_batch_size": self.split.global_batch,
            "ranks": self.ranks,
            "device": self.device,
            "row_length": self.row_length,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "timed": [
                {
                    "choice": dict(each.way),
                    "seconds": list(each.steps),
                    "verdict": self._verdict(each),
                    "tokens_per_second_per_rank": self._speed(each.measured),
                    "predicted_tokens_per_second_per_rank": self._speed(each.predicted),
                }
                for each in self.timed
            ],
            "trials": {str(dict(one)): trial.as_dict() for one, trial in self.tried.items()},
        }

    def numbers(self) -> dict[str, float]:
        trial, speed = self.tried[self.chosen], self._speed(self._best.measured)
        found = numbers_of(self.split, self.row_length, trial, len(self.tried), self.seconds)
        return found if speed is None else {**found, "tokens_per_second_per_gpu": round(speed, 1)}

    def details(self) -> list[Block]:
        header = ("configuration", "tokens/s per rank", "steps", "predicted", "peak", "verdict")
        rows = [self._cells(each) for each in self.timed]
        return [Table("", header, rows)]
