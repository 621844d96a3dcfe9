"""The micro-batch of validation: by default that of training, as long as it fits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from torchtune_adaptive.core import Probe, SizeTrial
from torchtune_adaptive.recipe.data.dataset import Data
from torchtune_adaptive.recipe.data.row_lengths import RowLengths
from torchtune_adaptive.recipe.search.prober import Prober

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ValidationRows:
    """The rows that a run is validated on."""

    data: Data
    lengths: RowLengths
    size: int | None
    """The rows in a micro-batch, if the config says it."""
    ranks: int
    """The data-parallel ranks that share them."""


def fit_validation(
    prober: Prober, probe: Probe, rows: ValidationRows | None, default: Callable[[int], int]
) -> SizeTrial | None:
    """Halve the wanted size until it fits; None where nothing is validated.

    Validation is a forward pass without gradients, so what fits in training mostly fits here. Not if rows are
    longer, or if ``batch_size_val`` asks for more. The loss does not depend on the size.

    Args:
        prober: finds the longest row.
        probe: tries it; inside its context, so that the optimizer's state is in memory.
        rows: what is validated on.
        default: the size to start with where the config gives none, for rows of so many tokens.
    """
    if rows is None:
        return None
    worst = prober.worst_case(rows.data, rows.lengths)
    worst = replace(worst, source=f"dataset_val, {worst.source}")
    size = rows.size or default(worst.length)
    size = max(1, min(size, -(-len(rows.data.dataset) // rows.ranks)))
    while True:
        trial = probe.trial_of_validation(size, worst.batch(size))
        log.info(f"Validation, {worst.length} tokens a row: {trial.line()}")
        if trial.fits:
            return trial
        if size == 1:
            raise worst.nothing_fits(trial)
        size //= 2
