"""Advantages are torchtune's, and defined where torchtune's are not."""

from __future__ import annotations

import math

import pytest
import torch
from torchtune import rlhf

from tests.helpers.rollouts import MAX_NEW, answered
from torchtune_adaptive.recipe.rollout.judging import estimate, relative
from torchtune_adaptive.recipe.rollout.rows import Row

KL_COEFF, GAMMA, LMBDA = 0.05, 0.98, 0.9


def test_rewards_are_compared_within_their_group() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.5], [0.0, 0.0, -1.0]])
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(relative(rewards), expected, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("rewards", [[[3.0], [-1.0]], [[0.1] * 3, [1 / 3] * 3], [[1e9] * 7]])
def test_a_reward_alone_in_its_group_or_like_all_others_is_as_expected(
    rewards: list[list[float]],
) -> None:
    assert not relative(torch.tensor(rewards)).any()


def as_torchtune(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of its PPO recipe, which pads responses to the same length."""
    lengths = torch.tensor([len(row.old) for row in rows])  # type: ignore[arg-type]
    padding = torch.arange(MAX_NEW) >= lengths[:, None]
    old, reference = torch.ones(2, len(rows), MAX_NEW)
    values = torch.zeros(len(rows), MAX_NEW)
    last = torch.where((lengths > 1) & (lengths < MAX_NEW), lengths, lengths - 1)
    for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        assert row.old is not None and row.reference is not None and row.values is not None
        old[at, :length], reference[at, :length] = row.old, row.reference
        values[at, : last[at] + 1] = row.values[: last[at] + 1]
    scores = torch.tensor([row.reward for row in rows])
    rewards, _, _ = rlhf.get_rewards_ppo(scores, old, reference, KL_COEFF, last)
    return rlhf.estimate_advantages(values, rewards, GAMMA, LMBDA, masks=~padding)


def test_estimates_are_torchtunes() -> None:
    rows = answered(10, value_terms=True)
    advantages, returns = as_torchtune(rows)
    estimate(rows, MAX_NEW, KL_COEFF, GAMMA, LMBDA)
    for row, advantage, expected in zip(rows, advantages, returns, strict=True):
        assert isinstance(row.advantages, torch.Tensor)
        assert row.old is not None and row.returns is not None and row.values is not None
        tokens, counted = len(row.old), len(row.values)
        assert (len(row.advantages), len(row.returns)) == (tokens, counted)
        assert counted == tokens + (1 < tokens < MAX_NEW)
        torch.testing.assert_close(row.advantages, advantage[:tokens], atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(row.returns, expected[:counted], atol=2e-6, rtol=1e-6)


def test_rows_of_all_ranks_are_whitened_together() -> None:
    whole, ranks = (answered(10, value_terms=True) for _ in range(2))
    estimate(whole, MAX_NEW, KL_COEFF, GAMMA, LMBDA)
    sums: list[torch.Tensor] = []

    def note(here: torch.Tensor) -> torch.Tensor:
        sums.append(here)
        return here

    for half in (answered(10, value_terms=True)[:4], answered(10, value_terms=True)[4:]):
        estimate(half, MAX_NEW, KL_COEFF, GAMMA, LMBDA, note)
    for half in (ranks[:4], ranks[4:]):
        estimate(half, MAX_NEW, KL_COEFF, GAMMA, LMBDA, lambda here: sums[0] + sums[1])
    for one, other in zip(whole, ranks, strict=True):
        torch.testing.assert_close(one.advantages, other.advantages, atol=1e-6, rtol=0.0)
        torch.testing.assert_close(one.returns, other.returns, atol=0.0, rtol=0.0)


def test_a_rollout_of_one_token_has_an_advantage() -> None:
    [row] = answered(1, value_terms=True)
    assert row.old is not None and len(row.old) == 1
    estimate([row], MAX_NEW, KL_COEFF, GAMMA, LMBDA)
    assert isinstance(row.advantages, torch.Tensor) and math.isfinite(float(row.advantages))
