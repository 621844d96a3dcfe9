"""What the searches of a run work with: what makes their trials, and the rows that these are made of."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from torchtune_adaptive.core import (
    Batch,
    Generators,
    Loader,
    MicroBatches,
    Phase,
    Probe,
    Ranks,
    SampleOrder,
    SizeTrial,
    Split,
    TrainStep,
    Watchdog,
    Weightless,
)
from torchtune_adaptive.recipe.data.dataset import Data
from torchtune_adaptive.recipe.data.row_lengths import RowLengths
from torchtune_adaptive.recipe.search.worst_case import WorstCase, worst_case
from torchtune_adaptive.recipe.settings.adaptive import AdaptiveSettings
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.fingerprint import search_facts
from torchtune_adaptive.recipe.setup.flex_attention import compiles

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ValidationRows:
    """The rows that a run is validated on."""

    data: Data
    lengths: RowLengths
    size: int | None
    """The rows in a micro-batch, if the config says it."""


@dataclass(frozen=True)
class RowsToTry:
    """The rows that a run trains on, and is validated on."""

    data: Data
    order: SampleOrder
    configured: Split
    """The batch that the config asks for."""
    lengths: RowLengths
    validation: ValidationRows | None = None

    @property
    def per_rank(self) -> int:
        """The most rows that a rank has in an epoch."""
        return -(-self.order.per_epoch // self.configured.ranks)

    @cached_property
    def first_samples(self) -> list[int]:
        """The samples of the first step; rank ``r`` of ``n`` has those at ``r``, ``r + n``, ..."""
        return self.order.epoch(0)[: self.configured.global_batch].tolist()

    def first_step(self, ranks: Ranks, micro_batches: MicroBatches, size: int) -> Sequence[Batch]:
        """A rank's rows of the first step, in micro-batches of a size."""
        data, order, shares = self.data, self.order, self.configured.ranks
        mine = ranks.rank * shares // ranks.size  # several ranks may hold the same rows
        loader = Loader(data.dataset, data.collate, order, mine, shares, micro_batches)
        portions = micro_batches.portions(self.first_samples, size, mine, shares)
        return _Fresh([batch for _, batch in loader.bring([portions])])


class _Fresh(Sequence[Batch]):
    """Batches that are copied when they are used: on the simulated device, those of a whole step would count
    as in use at once."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        batch: Any = self._batches[index]
        if isinstance(batch, Weightless):
            return Weightless(_copied(batch.batch))
        return _copied(batch)


def _copied(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


@dataclass(frozen=True)
class Prober:
    """Makes the trials of all searches of a run."""

    step: TrainStep
    """The step that training will use."""
    ranks: Ranks
    watchdog: Watchdog
    asked: Asked

    @property
    def settings(self) -> AdaptiveSettings:
        return self.asked.settings

    @property
    def compiled(self) -> bool:
        """Whether the model is compiled."""
        return bool(self.asked["compile"])

    def enter(self, activity: str) -> None:
        """Tell the watchdog of an activity that may take any time."""
        self.watchdog.enter(activity, patience=None)

    def capacity(self) -> int:
        """The bytes that any rank can get. After the first steps of a probe, they no longer include what
        communication and kernels keep outside of the allocator."""
        return min(self.ranks.gather(self.step.memory.capacity()))

    def facts(self, **trials: Any) -> dict[str, Any]:
        """Everything that the result of a search depends on, with what its ``trials`` are made of."""
        return search_facts(
            self.asked,
            **trials,
            ranks=self.ranks.size,
            device=self.step.memory.name,
            capacity=self.capacity(),
        )

    def place(self) -> str:
        """A digest of ranks, device and config: sizes that were found with the same one fit."""
        rows = {key: str(self.asked.cfg.get(key)) for key in ("dataset", "tokenizer")}
        facts = self.facts(rows=rows, all_settings=asdict(self.settings))
        text = json.dumps(facts, sort_keys=True, default=str)
        # Of rank 0: where ranks differ, all are to do the same.
        return self.ranks.from_rank_zero(hashlib.sha256(text.encode()).hexdigest())

    def probe(self, accumulation: Callable[[int], int]) -> Probe:
        """A probe, which is a context; ``accumulation`` gives the micro-batches in a step of a size."""
        if self.compiled and self.step.device.type == "cpu":
            log.info(
                "The simulated device sees single operations, so compiled regions run eager in trials."
            )
        # How long a rank compiles cannot be bounded.
        patience = None if compiles(self.asked) else self.settings.rank_timeout
        return Probe(
            step=self.step,
            accumulation=accumulation,
            headroom=self.settings.headroom,
            entering=lambda activity: self.watchdog.enter(activity, patience=patience),
        )

    @contextmanager
    def primed(
        self,
        accumulation: Callable[[int], int],
        batch: Callable[[int], Any],
        nothing_fits: Callable[[SizeTrial], Exception],
    ) -> Iterator[tuple[Probe, SizeTrial]]:
        """A context with a probe after its first steps, and the trial of them.

        Where not even one row of the largest ``batch`` fits, ``nothing_fits`` makes the error.
        """
        with self.probe(accumulation) as probe:
            first = probe.prime(batch)
            if not first.fits:
                raise nothing_fits(first)
            yield probe, first

    def fit_validation(
        self, probe: Probe, rows: RowsToTry, default: Callable[[int], int]
    ) -> SizeTrial | None:
        """Halve the wanted micro-batch of validation until it fits; None where nothing is validated.

        Validation is a forward pass without gradients, so what fits in training mostly fits here. Not if rows
        are longer, or if ``batch_size_val`` asks for more. The loss does not depend on the size.

        Args:
            probe: a probe in its context, so that the optimizer's state is in memory.
            rows: the rows of the run.
            default: the size to start with where the config gives none, for rows of so many tokens.
        """
        if (validation := rows.validation) is None:
            return None
        worst = self.worst_case(validation.data, validation.lengths)
        worst = replace(worst, source=f"dataset_val, {worst.source}")
        size = validation.size or default(worst.length)
        size = max(1, min(size, -(-len(validation.data.dataset) // rows.configured.ranks)))
        phase = Phase("validation", self.step, self.step.sums)
        while True:
            trial = probe.trial_of(phase, size, worst.batch(size))
            log.info(f"Validation, {worst.length} tokens a row: {trial.line()}")
            if trial.fits:
                return trial
            if size == 1:
                raise worst.nothing_fits(trial)
            size //= 2

    def worst_case(self, data: Data, lengths: RowLengths, length: int | None = None) -> WorstCase:
        """The row that trials are made of, of a given length or of the longest that the data can produce;
        random numbers continue as if no row had been read."""
        self.enter("looking for the longest row")
        generators = Generators(self.step.device)
        worst = worst_case(data, length, self.ranks, lengths)
        generators.restore()
        return worst
