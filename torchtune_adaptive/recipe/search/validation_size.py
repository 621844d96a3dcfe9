"""The micro-batch of validation: by default that of training, as long as it fits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from torchtune_adaptive.core import Probe, SizeTrial, trial_line
from torchtune_adaptive.recipe.search.context import SearchContext, nothing_fits

log = logging.getLogger(__name__)


def fit_validation(
    run: SearchContext, probe: Probe, default: Callable[[int], int]
) -> SizeTrial | None:
    """Halve the wanted size until it fits; None where nothing is validated.

    Validation is a forward pass without gradients, so what fits in training mostly fits here. Not if rows are
    longer, or if ``batch_size_val`` asks for more. The loss does not depend on the size.

    Args:
        run: the run to try it on.
        probe: tries it; inside its context, so that the optimizer's state is in memory.
        default: the size to start with where the config gives none, for rows of so many tokens.
    """
    data = run.validation
    if data is None:
        return None
    worst = run.worst_case(None, data)
    worst = replace(worst, source=f"dataset_val, {worst.source}")
    size = run.cfg.get("batch_size_val") or default(worst.length)
    size = max(1, min(size, -(-len(data.dataset) // run.configured.ranks)))
    while True:
        trial = probe.trial_of_validation(size, worst.batch(size, data.collate))
        log.info(f"Validation, {worst.length} tokens a row: {trial_line(trial)}")
        if trial.fits:
            return trial
        if size == 1:
            raise nothing_fits(trial, worst)
        size //= 2
