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
    # Not torch's generator: on a CPU it takes 32 bits of its seed, and among a million rows some were twins.
    bits = np.random.Philox(np.random.SeedSequence((seed, rollout, row)))
    return torch.from_numpy(np.random.Generator(bits).random(tokens))
