"""Advantages: how much better a response, or one of its tokens, was than expected. On the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchtune_adaptive.recipe.rollout.rows import Row


def relative(rewards: torch.Tensor) -> torch.Tensor:
    """How much better each reward is than the others of its group, in standard deviations.

    A reward that is alone in its group, or like all others in it, is as expected: 0.

    Args:
        rewards: a row for each group.
    """
    raise NotImplementedError


def estimate(
    rows: Sequence[Row],
    max_new: int,
    kl_coeff: float,
    gamma: float,
    lmbda: float,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums,
) -> None:
    """Set the advantages and returns of rows by generalized advantage estimation.

    Args:
        rows: with ``old``, ``reference``, ``reward``, and ``values`` before each token and after the last.
        max_new: tokens of the longest response.
        kl_coeff: what the divergence from the reference costs.
        gamma: the discount of rewards.
        lmbda: that of advantages.
        total: the function that sums a tensor over all ranks: advantages are whitened over the whole rollout.
    """
    raise NotImplementedError
