"""Draws: a function of seed, rollout and row."""

from __future__ import annotations

import torch

from torchtune_adaptive.recipe.rollout.rows import draws


def test_draws_depend_on_seed_rollout_and_row_alone() -> None:
    found = {
        each: draws(*each, 8)
        for each in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1 << 32, 0, 0), (0, 0, 1 << 32)]
    }
    torch.rand(3)
    for each, numbers in found.items():
        assert torch.equal(draws(*each, 8), numbers)
    assert len({tuple(numbers.tolist()) for numbers in found.values()}) == len(found)


def test_draws_are_those_of_earlier_versions() -> None:
    """A run is resumed with the draws that it began with."""
    assert draws(7, 3, 11, 3).tolist() == [
        0.8649091672632698,
        0.890926246012486,
        0.7907136516772075,
    ]


def test_of_more_draws_the_first_are_the_same() -> None:
    assert torch.equal(draws(1, 2, 3, 20)[:5], draws(1, 2, 3, 5))


def test_draws_are_uniform() -> None:
    numbers = torch.stack([draws(0, 0, row, 200) for row in range(200)])
    assert numbers.dtype is torch.float64 and numbers.min() >= 0 and numbers.max() < 1
    for each in (numbers.flatten(), numbers[:, 0], numbers[0]):
        assert abs(each.mean() - 0.5) < 0.08 and abs(each.var() - 1 / 12) < 0.02
