"""What the rows of a rollout are worth: their rewards, and the advantages that follow from these.

An advantage is how much better a response, or one of its tokens, is than was expected. All is on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from torchtune_adaptive.core import Ranks
from torchtune_adaptive.recipe.rewards import Rewards
from torchtune_adaptive.recipe.rollout.rows import Row, known

Judge = Callable[[list[Row]], dict[str, torch.Tensor]]
"""A function that sets rewards and advantages of this rank's rows; gives what is logged of each row."""
Total = Callable[[torch.Tensor], torch.Tensor]
"""The function that sums a tensor over all ranks."""


def of_this_rank(sums: torch.Tensor) -> torch.Tensor:
    """The total where there is one rank."""
    return sums


def over(ranks: Ranks) -> Total:
    """The total over ranks, on each of them."""
    return lambda sums: torch.stack(ranks.gather(sums)).sum(0)


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


def relative(rewards: torch.Tensor) -> torch.Tensor:
    """How much better each reward is than the others of its group, in standard deviations.

    Where a group is one reward, or has equal ones, each is as was expected: its advantage is 0.

    Args:
        rewards: a row for each group.
    """
    rewards = rewards.double()
    away = rewards - rewards.mean(1, keepdim=True)
    if rewards.shape[1] > 1:
        away = away / (rewards.std(1, keepdim=True) + 1e-4)
    # A mean is rounded, so that equal rewards need not be equal to it.
    alike = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    return away.masked_fill(alike, 0.0).float()


def estimate(
    rows: Sequence[Row],
    max_new: int,
    kl_coeff: float,
    gamma: float,
    lmbda: float,
    total: Total = of_this_rank,
) -> None:
    """Set the advantages and returns of rows by generalized advantage estimation.

    The reward comes after the last token, if there is room for one more, and with the last token otherwise.
    Values that count are those up to the reward. As in torchtune, advantages are whitened over all rows and
    keep their mean.

    Args:
        rows: with ``old``, ``reference``, ``reward``, and the values before each token and after the last.
        max_new: the tokens of the longest response.
        kl_coeff: the price of the divergence from the reference.
        gamma: the discount of what comes a token later.
        lmbda: the discount of what is estimated a token later.
        total: the function that sums a tensor over all ranks, whose rows are whitened together.
    """
    for row in rows:
        tokens = len(known(row.old))
        # Not after a response of one token: so it is in torchtune.
        row.values = known(row.values)[: tokens + (1 < tokens < max_new)]
    values = _padded([row.values for row in rows])
    deltas = _padded([_rewards(row, kl_coeff) for row in rows])
    deltas += gamma * F.pad(values[:, 1:], (0, 1)) - values
    for at in reversed(range(deltas.shape[1] - 1)):
        deltas[:, at] += gamma * lmbda * deltas[:, at + 1]
    advantages, returns = deltas, deltas + values
    lengths = torch.tensor([len(known(row.old)) for row in rows])
    advantages = _whitened(advantages, torch.arange(values.shape[1]) < lengths[:, None], total)
    for row, advantage, expected in zip(rows, advantages, returns, strict=True):
        row.advantages = advantage[: len(known(row.old))].float()
        row.returns = expected[: len(known(row.values))].float()


def _rewards(row: Row, kl_coeff: float) -> torch.Tensor:
    """Of each value that counts."""
    divergence = known(row.old) - known(row.reference)
    rewards = F.pad(-kl_coeff * divergence, (0, len(known(row.values)) - len(divergence)))
    rewards[-1] += row.reward
    return rewards


def _whitened(numbers: torch.Tensor, counted: torch.Tensor, total: Total) -> torch.Tensor:
    """Numbers of variance 1 and the mean that they had, among those that count on all ranks."""
    kept = numbers[counted]
    count, summed, squares = total(torch.stack([counted.sum(), kept.sum(), kept.square().sum()]))
    mean = summed / count
    variance = ((squares - summed * mean) / (count - 1).clamp_min(1)).clamp_min(0)
    return (numbers - mean) * torch.rsqrt(variance + 1e-8) + mean


def _padded(numbers: Sequence[torch.Tensor | None]) -> torch.Tensor:
    return pad_sequence([known(each).double() for each in numbers], batch_first=True)
