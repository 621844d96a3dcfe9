"""The sizes of a run that generates its rows: of generating, scoring and training, each found by trials.

All are searched in one snapshot, with all models and the optimizer's state in memory. Nothing of one phase is
on the device in another, so they are searches of their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import Block, NothingFits, Paragraph, Table, counted
from torchtune_adaptive.core import ByRows, Phase, Probe, SizeTrial, Split, candidates, strategies
from torchtune_adaptive.recipe.checkpoints.training_state import TrainingState
from torchtune_adaptive.recipe.rollout.rows import collate, longest_rows
from torchtune_adaptive.recipe.search.decide import DecidedBatch, announce
from torchtune_adaptive.recipe.search.prober import Prober
from torchtune_adaptive.recipe.search.report import Report, batch_numbers
from torchtune_adaptive.recipe.search.size_search import SizeSearch
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.fingerprint import search_facts
from torchtune_adaptive.recipe.settings.knob_table import ACCUMULATION, configured_batch
from torchtune_adaptive.recipe.setup.phases import Phases

log = logging.getLogger(__name__)
TRAINING, GENERATION, SCORING = "training", "generation", "scoring"
_KEYS = {
    GENERATION: f"{BLOCK}.generation_batch_size",
    SCORING: f"{BLOCK}.scoring_batch_size",
}
Found = strategies.SearchResult[SizeTrial]


@dataclass(frozen=True)
class PhaseReport(Report):
    """What the searches of all phases have found."""

    name: ClassVar[str] = "batch_size_search"
    found: dict[str, Found]
    split: Split
    fixed: dict[str, int]
    """The sizes that the config gives."""
    row: str
    """What trials were made of."""
    device: str
    headroom: float
    seconds: float

    def size(self, phase: str) -> int:
        size = self.found[phase].size if phase in self.found else self.fixed[phase]
        assert size is not None, "a search that found nothing has no report"
        return size

    def reason(self, phase: str) -> str:
        """Why this size and not the next."""
        result = self.found[phase]
        if result.status is strategies.Status.CEILING:
            return (
                f"{result.status.value}: there are no more rows, or {BLOCK}.ceiling no larger size"
            )
        if result.status is not strategies.Status.NEXT_DOES_NOT_FIT:
            return result.status.value
        failed = min((t for t in result.trials if not t.fits), key=lambda trial: trial.size)
        where = f"{failed.deciding.trouble} on rank {failed.deciding_rank}"
        return (
            f"{counted(failed.size, 'row')} {'does' if failed.size == 1 else 'do'} not fit: {where}"
        )

    def text(self) -> str:
        lines = [
            f"Searched with rows of {self.row} on {self.device}, {self.headroom:.0%} headroom, "
            f"{self.seconds:.1f} s:"
        ]
        for phase in (GENERATION, SCORING, TRAINING):
            why = self.reason(phase) if phase in self.found else f"{_KEYS[phase]} says it"
            lines.append(f"{phase} in micro-batches of {self.size(phase)} ({why})")
        rows = counted(self.split.global_batch, "row")
        return "\n".join([*lines, f"global batch unchanged: {rows} ({self.split.text()})"])

    def overrides(self) -> str:
        sizes = " ".join(f"{key}={self.size(phase)}" for phase, key in _KEYS.items())
        accumulation = f"{ACCUMULATION}={self.split.accumulation}"
        return f"{accumulation} {sizes} use_maximum_batch_size=False"

    def applied_to(self, cfg: DictConfig) -> DictConfig:
        for phase, key in _KEYS.items():
            OmegaConf.update(cfg, key, self.size(phase), force_add=True)
        return cfg

    def numbers(self) -> dict[str, float]:
        return {
            **{f"{phase}_batch_size": self.size(phase) for phase in (TRAINING, *_KEYS)},
            "gradient_accumulation_steps": self.split.accumulation,
            "trials": sum(len(result.trials) for result in self.found.values()),
            "seconds": round(self.seconds, 3),
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            **batch_numbers(self.split),
            **self.numbers(),
            "overrides": self.overrides(),
            "row": self.row,
            "device": self.device,
            "headroom": self.headroom,
            "reasons": {phase: self.reason(phase) for phase in self.found},
            "trials": {
                phase: [trial.as_dict() for trial in result.trials]
                for phase, result in self.found.items()
            },
        }

    def blocks(self) -> list[Block]:
        tables = [
            Table(phase.capitalize(), SizeTrial.COLUMNS, [t.cells() for t in result.trials])
            for phase, result in self.found.items()
        ]
        return [Paragraph(self.text().splitlines()), *tables]


def decide_sizes(prober: Prober, phases: Phases, saved: TrainingState | None) -> DecidedBatch:
    """Find the sizes of all phases, or take those that the config says; phases have theirs afterward.

    Args:
        prober: the maker of trials.
        phases: generation and scoring.
        saved: the training state of the checkpoint that is resumed, whose sizes are confirmed.
    """
    settings, rows = prober.settings, phases.sizes.rows
    configured = configured_batch(prober.cfg, prober.ranks.size)
    forward = (prober.cfg.get("forward_batch_size") or phases.sizes.prompts) * phases.sizes.samples
    of_phases: dict[str, Phase[Any, Any]] = {GENERATION: phases.generation, SCORING: phases.scoring}
    fixed = {GENERATION: settings.generation_batch_size, SCORING: settings.scoring_batch_size}
    given = {name: size for name, size in fixed.items() if size is not None}
    micro_batches = ByRows(settings.rounding)
    report, start, largest = None, configured, None
    sizes = {name: given.get(name, forward) for name in of_phases}
    if settings.use_maximum_batch_size:
        report = _Search(prober, phases, of_phases, given).run(_known(saved))
        largest = report.size(TRAINING)
        start = report.split
        sizes = {name: report.size(name) for name in of_phases}
        announce(prober.cfg, prober.ranks, report)
    after = settings.grow_back_after
    for name, phase in of_phases.items():
        phase.begin(min(sizes[name], rows), after if settings.shrinks else None)
    if report is None:
        log.info(
            f"Rollouts of {counted(rows, 'row')} per rank: generation in micro-batches of "
            f"{phases.generation.size}, scoring of {phases.scoring.size}, training of {start.micro_batch}."
        )
    return DecidedBatch(start, largest, micro_batches, report=report)


def _known(saved: TrainingState | None) -> dict[str, int]:
    """The sizes that an earlier part of this run has found."""
    if saved is None or saved.growth.largest is None or saved.rollouts is None:
        return {}
    return {TRAINING: saved.growth.largest, **saved.rollouts["found"]}


@dataclass(frozen=True)
class _Search:
    prober: Prober
    phases: Phases
    of_phases: dict[str, Phase[Any, Any]]
    given: dict[str, int]

    def run(self, known: dict[str, int]) -> PhaseReport:
        started, prober, settings = time.perf_counter(), self.prober, self.prober.settings
        sizes, longest = self.phases.sizes, self.phases.longest
        rows = sizes.step_rows
        row = f"{longest} + {sizes.max_new} tokens, the longest prompt and response"
        log.info(f"Searching for the most rows of {row}.")
        found: dict[str, Found] = {}
        with prober.probe(lambda size: -(-rows // size)) as probe:
            first = probe.prime(self._batch)
            _require(first, TRAINING)
            found[TRAINING] = self._find(
                TRAINING, first, lambda size: probe.trial(size, self._batch), known
            )
            for name, phase in self.of_phases.items():
                if name not in self.given:
                    found[name] = self._find_phase(probe, name, phase, known)
        micro_batch = found[TRAINING].size
        assert micro_batch is not None
        return PhaseReport(
            found=found,
            split=Split(micro_batch, -(-rows // micro_batch), prober.ranks.size, rows),
            fixed=self.given,
            row=row,
            device=prober.step.memory.name,
            headroom=settings.headroom,
            seconds=time.perf_counter() - started,
        )

    def _find_phase(
        self, probe: Probe, name: str, phase: Phase[Any, Any], known: dict[str, int]
    ) -> Found:
        def trial(size: int) -> SizeTrial:
            return probe.trial_of(phase, size, self._rows(size))

        self.phases.generator.width = self.phases.longest
        first = trial(1)
        _require(first, name)
        return self._find(name, first, trial, known, {1: first})

    def _find(
        self,
        name: str,
        first: SizeTrial,
        trial: Callable[[int], SizeTrial],
        known: dict[str, int],
        tried: dict[int, SizeTrial] | None = None,
    ) -> Found:
        prober, settings, sizes = self.prober, self.prober.settings, self.phases.sizes
        ceiling = rows = sizes.step_rows if name == TRAINING else sizes.rows
        if name == TRAINING and settings.ceiling is not None:
            ceiling = min(rows, settings.ceiling)
        log.info(f"Searching for the micro-batch of {name}.")
        possible = candidates(settings.rounding, ceiling, rows)
        about = search_facts(
            prober.cfg,
            settings,
            phase=name,
            prompt=self.phases.longest,
            largest_candidate=possible[-1],
            ranks=prober.ranks.size,
            device=prober.step.memory.name,
            capacity=prober.capacity(),
        )
        assert settings.search != "predict", "it is refused"
        cache = SizeSearch.remembered(settings.cache)
        search = SizeSearch(
            trial, first, possible, settings.search, prober.ranks, cache, tried=tried or {}
        )
        found = search.result(about, known.get(name))
        if found.size is None:
            _require(found.trials[-1], name)
        return found

    def _rows(self, size: int) -> Any:
        phases = self.phases
        return longest_rows(size, phases.longest, phases.sizes.max_new, phases.values)

    def _batch(self, size: int) -> dict[str, Any]:
        return collate(self._rows(size), self.phases.padding_id)


def _require(trial: SizeTrial, phase: str) -> None:
    """Raise where not even one row fits."""
    if not trial.fits:
        raise _nothing_fits(trial, phase)


def _nothing_fits(trial: SizeTrial, phase: str) -> NothingFits:
    return trial.nothing_fits(
        f"row in {phase}",
        "Lower max_generated_tokens, leave out long prompts, turn on enable_activation_checkpointing, use "
        f"more ranks, or allow more memory ({BLOCK}.memory_limit, {BLOCK}.headroom).",
    )
