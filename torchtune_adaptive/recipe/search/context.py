"""What every part of a search works with: the run that is being searched on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.common import NothingFits
from torchtune_adaptive.core import (
    Generators,
    Probe,
    Ranks,
    SampleOrder,
    SizeTrial,
    Split,
    TrainStep,
    Watchdog,
)
from torchtune_adaptive.recipe.data.dataset import Data, validation_config
from torchtune_adaptive.recipe.data.row_lengths import RowLengths
from torchtune_adaptive.recipe.search.worst_case import WorstCase, worst_case
from torchtune_adaptive.recipe.settings.adaptive import BLOCK, AdaptiveSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchContext:
    """A run that has been set up, as far as a search needs it."""

    cfg: DictConfig
    settings: AdaptiveSettings
    configured: Split
    """The batch that the config asks for."""
    data: Data
    order: SampleOrder
    step: TrainStep
    """The step that training will use."""
    ranks: Ranks
    watchdog: Watchdog
    validation: Data | None = None
    """What is validated on while training."""

    @property
    def compiled(self) -> bool:
        return bool(self.cfg.get("compile", False))

    def worst_case(self, length: int | None, data: Data | None = None) -> WorstCase:
        """The row that trials are made of, of a given length or of the longest that the data can produce;
        random numbers continue as if no row had been read.

        Args:
            length: of the row.
            data: other than what is trained on.
        """
        self.watchdog.enter("looking for the longest row", patience=None)
        generators = Generators(self.step.device)
        if data is None:
            worst = worst_case(self.data, length, self.ranks, self.row_lengths)
        else:
            lengths = self._lengths_of(data, validation_config(self.cfg))
            worst = worst_case(data, length, self.ranks, lengths)
        generators.restore()
        return worst

    @cached_property
    def row_lengths(self) -> RowLengths:
        return self._lengths_of(self.data, self.cfg)

    def _lengths_of(self, data: Data, cfg: DictConfig) -> RowLengths:
        return RowLengths(data.dataset, cfg, self.ranks, self.settings.cache, data.rows.length)


def probe_of(
    run: SearchContext,
    batch: Callable[[int], dict[str, Any]],
    accumulation: Callable[[int], int],
) -> Probe:
    """The probe of a run.

    Args:
        run: the run to search on.
        batch: makes the worst-case batch of a number of rows.
        accumulation: the micro-batches in a step, for a given size.
    """
    if run.compiled and run.step.device.type == "cpu":
        log.info(
            "The simulated device sees single operations, so compiled regions run eager in trials."
        )
    # How long a rank compiles cannot be bounded.
    patience = None if run.compiled else run.settings.rank_timeout
    return Probe(
        step=run.step,
        batch=batch,
        accumulation=accumulation,
        headroom=run.settings.headroom,
        ranks=run.ranks,
        entering=lambda phase: run.watchdog.enter(phase, patience=patience),
        compiled=run.compiled,
    )


def nothing_fits(trial: SizeTrial, worst: WorstCase) -> NothingFits:
    """Why not even one row can be trained, and what would change that."""
    return NothingFits(
        f"Not even {trial.size} row of {worst.size} ({worst.source}) fits: {trial.shortage}. Shorten the "
        "rows (tokenizer.max_seq_len), turn on enable_activation_checkpointing, use LoRA or QLoRA, use more "
        f"ranks, or allow more memory ({BLOCK}.memory_limit, {BLOCK}.headroom)."
    )
