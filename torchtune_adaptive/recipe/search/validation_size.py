"""The micro-batch of validation: by default that of training, as long as it fits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from torchtune_adaptive.core import Phase, Probe, SizeTrial
from torchtune_adaptive.recipe.search.prober import Prober, RowsToTry

log = logging.getLogger(__name__)


def fit_validation(
    prober: Prober, probe: Probe, rows: RowsToTry, default: Callable[[int], int]
) -> SizeTrial | None:
    """Halve the wanted size until it fits; None where nothing is validated.

    Validation is a forward pass without gradients, so what fits in training mostly fits here. Not if rows are
    longer, or if ``batch_size_val`` asks for more. The loss does not depend on the size.

    Args:
        prober: the prober, which finds the longest row.
        probe: the probe that tries it; inside its context, so that the optimizer's state is in memory.
        rows: the rows of the run.
        default: the size to start with where the config gives none, for rows of so many tokens.
    """
    validation = rows.validation
    if validation is None:
        return None
    worst = prober.worst_case(validation.data, validation.lengths)
    worst = replace(worst, source=f"dataset_val, {worst.source}")
    size = validation.size or default(worst.length)
    phase = Phase("validation", prober.step, prober.step.sums)
    size = max(1, min(size, -(-len(validation.data.dataset) // rows.configured.ranks)))
    while True:
        trial = probe.trial_of(phase, size, worst.batch(size))
        log.info(f"Validation, {worst.length} tokens a row: {trial.line()}")
        if trial.fits:
            return trial
        if size == 1:
            raise worst.nothing_fits(trial)
        size //= 2
