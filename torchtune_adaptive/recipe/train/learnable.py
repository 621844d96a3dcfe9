"""Whether there is anything to learn in the data, before a search or a training step takes its time."""

from __future__ import annotations

import random
from typing import Any

from torchtune_adaptive.common import NothingToLearn, counted
from torchtune_adaptive.core import Generators, TrainStep
from torchtune_adaptive.recipe.data.dataset import Data, checked_row

MOST_SAMPLES = 1000
"""Samples to look at, over all ranks, spread over the dataset. Usually the first one settles it."""

_SAMPLES_PER_ROUND = 8  # on each rank, so that no rank waits long for one that finds nothing


def _has_label(batch: dict[str, Any], ignored: int) -> bool:
    """Whether there is a token to predict: the first of a row is not predicted."""
    return bool((batch["labels"][..., 1:] != ignored).any())


def require_something_to_learn(data: Data, step: TrainStep) -> None:
    """Check that some sample has a token to predict; random numbers continue as if none had been read.

    An empty dataset is left to those who share out its rows.

    Raises:
        ConfigError: the rows are those of another kind of recipe.
        NothingToLearn: on every rank, if no rank finds such a sample.
    """
    ranks, samples = step.ranks, len(data.dataset)
    looked_at = random.Random(0).sample(range(samples), min(samples, MOST_SAMPLES))
    mine = looked_at[ranks.rank :: ranks.size]
    generators = Generators(step.device)
    for start in range(0, -(-len(looked_at) // ranks.size), _SAMPLES_PER_ROUND):
        samples_of_round = mine[start : start + _SAMPLES_PER_ROUND]
        found = any(
            _has_label(data.collate([checked_row(data, sample)]), step.objective.ignored)
            for sample in samples_of_round
        )
        generators.restore()
        if ranks.any(found):
            return
    if not looked_at:
        return
    limit = getattr(data.tokenizer, "max_seq_len", None)
    cut = "" if limit is None else f"raise tokenizer.max_seq_len ({limit}), "
    raise NothingToLearn(
        f"dataset: looked at {len(looked_at):,} of {counted(samples, 'sample')}, and none has a token to "
        f"predict: all labels after the first are {step.objective.ignored}, so training would learn nothing. "
        f"Check the dataset's columns and roles (column_map) and collate_fn, {cut}or train on prompts, too "
        "(dataset.train_on_input=True)."
    )
