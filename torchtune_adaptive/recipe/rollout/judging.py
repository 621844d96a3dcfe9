"""What the rows of a rollout are worth: their rewards, and the advantages that follow from these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchtune_adaptive.recipe.rewards import Rewards
from torchtune_adaptive.recipe.rollout.advantages import Total, estimate, of_this_rank, relative
from torchtune_adaptive.recipe.rollout.rows import Row, known

Judge = Callable[[list[Row]], dict[str, torch.Tensor]]
"""A function that sets rewards and advantages of this rank's rows; gives what is logged of each row."""


@dataclass(frozen=True)
class ByFunctions:
    """Rewards by functions, and advantages over the other responses to a prompt."""

    rewards: Rewards
    samples: int
    """Responses to each prompt."""

    def __call__(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        found = self.rewards.of([known(row.response) for row in rows], [row.data for row in rows])
        advantages = relative(found.rewards.view(-1, self.samples)).flatten()
        for row, reward, advantage in zip(rows, found.rewards, advantages, strict=True):
            row.reward, row.advantages = float(reward), float(advantage)
        each = found.each if len(found.each) > 1 else {}
        return {
            "rewards": found.rewards,
            "successes": found.successes,
            **{f"rewards/{name}": rewards for name, rewards in each.items()},
        }


@dataclass(frozen=True)
class ByModel:
    """Rewards by a model, and advantages over what the value model has expected."""

    max_new: int
    """Tokens of the longest response."""
    kl_coeff: float
    gamma: float
    lmbda: float
    penalty: float = 0.0
    """The reward of a response that is too short or does not end, instead of the model's."""
    min_length: int = 0
    """Tokens of the shortest response without a penalty."""
    must_stop: bool = False
    """Whether a response without a stop token is penalized."""
    total: Total = of_this_rank
    """The function that sums a tensor over all ranks."""

    def __call__(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        for row in rows:
            short = len(known(row.response)) < self.min_length
            is_penalized = short or (self.must_stop and not row.stopped)
            row.reward = self.penalty if is_penalized else float(known(row.scores)[-1])
        estimate(rows, self.max_new, self.kl_coeff, self.gamma, self.lmbda, self.total)
        rewards = torch.tensor([row.reward for row in rows])
        kl = torch.stack([(known(row.old) - known(row.reference)).sum() for row in rows])
        return {
            "scores": rewards,
            "kl": kl,
            "kl_reward": -self.kl_coeff * kl,
            "rlhf_reward": rewards - self.kl_coeff * kl,
        }
