"""The random numbers that rows are sampled with."""

from __future__ import annotations

import numpy as np
import torch


def draws(seed: int, rollout: int, row: int, tokens: int) -> torch.Tensor:
    """The uniform numbers of a row, in [0, 1): one for each token that it may get.

    They depend on nothing else, so neither on which rows are sampled beside it nor on what was sampled
    before. There is no state to save, or to restore after a trial.

    Args:
        seed: that of the run; not negative.
        rollout: the number of the rollout.
        row: the index of the row among those of all ranks.
        tokens: how many numbers; of more numbers, the first are the same.
    """
    # It counts, so that every row has a place in its sequence. Not torch's generator: on a CPU, that takes 32
    # bits of a seed, and among a million rows some would be twins.
    place = np.random.Philox(key=[seed, rollout], counter=[0, row, 0, 0])
    return torch.from_numpy(np.random.Generator(place).random(tokens))
