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
    return torch.from_numpy(_generator(seed, rollout, row).random(tokens))


def shuffled(seed: int, rollout: int, epoch: int, rank: int, rows: int) -> list[int]:
    """The order in which a rank trains on its rows of a rollout.

    Args:
        seed: that of the run; not negative.
        rollout: the number of the rollout.
        epoch: how often the rollout has been trained on before.
        rank: the rank.
        rows: how many rows.
    """
    order: list[int] = _generator(seed, rollout, rank, 1 + epoch).permutation(rows).tolist()
    return order


def _generator(seed: int, rollout: int, *place: int) -> np.random.Generator:
    # It counts, so that every place has one in its sequence. Not torch's generator: on a CPU, that takes 32
    # bits of a seed, and among a million rows some would be twins.
    counter = [0, *place, 0, 0][:4]
    return np.random.Generator(np.random.Philox(key=[seed, rollout], counter=counter))
