"""Losses of GRPO and PPO: torchtune's where these are means of all terms, and the same for every split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torchtune.rlhf import masked_mean
from torchtune.rlhf.loss import PPOLoss

from tests.helpers.rollouts import MAX_NEW, PADDING, answered, policy
from torchtune_adaptive.core import Summed
from torchtune_adaptive.recipe.rollout.judging import estimate
from torchtune_adaptive.recipe.rollout.losses import GRPOObjective, PPOObjective
from torchtune_adaptive.recipe.rollout.projection import LogProbs
from torchtune_adaptive.recipe.rollout.rows import Row, collate

EPSILON, KL_COEFF = 0.2, 0.05


def estimated(number: int) -> list[Row]:
    rows = answered(number, value_terms=True)
    estimate(rows, MAX_NEW, kl_coeff=0.05, gamma=0.98, lmbda=0.9)
    return rows


def near(numbers: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Numbers that a small update leads to, so that some ratios are clipped, and some are not; anything where
    nothing counts."""
    generator = torch.Generator().manual_seed(3)
    moved = numbers + 0.3 * torch.randn(numbers.shape, generator=generator)
    return moved.where(counted, torch.full_like(moved, -100.0)).requires_grad_()


def as_responses(rows: Sequence[Row], numbers: torch.Tensor, fill: float) -> torch.Tensor:
    """The numbers of responses, in torchtune's way: padded to the same length."""
    parts = [each[len(row.prompt) - 1 :][:MAX_NEW] for row, each in zip(rows, numbers, strict=True)]
    return torch.stack(
        [torch.cat([part, part.new_full((MAX_NEW - len(part),), fill)]) for part in parts]
    )


def gradient(loss: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    [found] = torch.autograd.grad(loss, of, retain_graph=True)
    return found


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def grpo_loss(batch: dict[str, torch.Tensor], rows: list[Row], now: torch.Tensor) -> Any:
    """``GRPOLoss`` of torchtune's main branch."""
    kept = as_responses(rows, batch["response"], 0)
    old, reference, pi = (
        as_responses(rows, each, 1.0).where(kept, torch.ones(()))
        for each in (batch["old"], batch["reference"], now)
    )
    advantages = torch.tensor([row.advantages for row in rows])[:, None]
    ratio = (pi - old).exp()
    held, free = advantages * ratio.clamp(1 - EPSILON, 1 + EPSILON), advantages * ratio
    gain = masked_mean(torch.minimum(held, free), kept)
    kl = masked_mean((reference - pi).exp() - (reference - pi) - 1, kept)
    return -(gain - KL_COEFF * kl), gain, kl, masked_mean((held < free).float(), kept)


def grpo_simple_loss(batch: dict[str, torch.Tensor], rows: list[Row], now: torch.Tensor) -> Any:
    """``GRPOSimpleLoss`` of torchtune's main branch."""
    kept = as_responses(rows, batch["response"], 0)
    reference, pi = (
        as_responses(rows, each, 1.0).where(kept, torch.ones(()))
        for each in (batch["reference"], now)
    )
    advantages = torch.tensor([row.advantages for row in rows])[:, None]
    gain = (pi - pi.detach()).exp() * advantages
    kl = (reference - pi).exp() - (reference - pi) - 1
    means = (masked_mean(each, kept, dim=1).mean() for each in (gain, kl))
    loss = masked_mean(-(gain - KL_COEFF * kl), kept, dim=1).mean()
    return loss, *means, torch.tensor(0.0)


@pytest.mark.parametrize(
    ("formula", "per_row"), [(grpo_loss, False), (grpo_simple_loss, True)], ids=["tokens", "rows"]
)
def test_grpo_is_torchtunes(formula: Callable[..., Any], per_row: bool) -> None:
    rows = answered(10)
    batch = collate(rows, PADDING)
    now = near(batch["old"], batch["response"])
    objective = GRPOObjective(LogProbs(policy()), EPSILON, KL_COEFF, per_row)
    weight = objective.weight(batch)
    assert weight == (10 if per_row else int(batch["response"].sum()))
    found = objective.summed_loss(lambda tokens: now, batch, weight)
    loss, gain, kl, clipped = formula(batch, rows, now)
    assert_same(found.loss / weight, loss)
    assert_same(gradient(found.loss / weight, now), gradient(loss, now))
    metrics = means(found, weight)
    for name, theirs in {"policy_loss": gain, "kl_loss": kl, "clipfrac": clipped}.items():
        assert_same(metrics[name], theirs.detach())
    assert per_row == (metrics["ratios"] == 1.0) and metrics["approx_policy_kl"] > 0.01


def means(found: Summed, weight: int) -> dict[str, torch.Tensor]:
    assert found.metrics is not None
    return {name: summed / weight for name, summed in found.metrics.items()}


def test_ppo_is_torchtunes() -> None:
    rows = estimated(10)
    batch = collate(rows, PADDING)
    now, values = (near(batch[name], batch[name] != 0) for name in ("old", "values"))
    objective = PPOObjective(LogProbs(policy()), EPSILON, value_clip_range=0.3, value_coeff=0.4)
    objective.begin(rows)
    weight = objective.weight(batch)
    found = objective.summed_loss(lambda tokens: (now, values[..., None]), batch, weight)
    kept, valued = (as_responses(rows, batch[name], 0) for name in ("response", "valued"))
    old, pi = (
        as_responses(rows, each, 1.0).where(kept, torch.ones(())) for each in (batch["old"], now)
    )
    old_values, phi, returns = (
        as_responses(rows, each, 0.0) * valued
        for each in (batch["values"], values, batch["returns"])
    )
    theirs = PPOLoss(EPSILON, value_clip_range=0.3, value_coeff=0.4)(
        old,
        pi,
        as_responses(rows, batch["advantages"], 0.0),
        old_values,
        phi,
        returns,
        kept,
        valued,
    )
    loss, policy_loss, value_loss, _, clipped = theirs
    assert_same(found.loss / weight, loss)
    for each in (now, values):
        assert_same(gradient(found.loss / weight, each), gradient(loss, each))
    metrics = means(found, weight)
    for name, expected in {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "clipfrac": clipped,
    }.items():
        assert_same(metrics[name], expected)


class PolicyAndValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = policy(0), policy(1)
        self.value.output = nn.Linear(8, 1)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(tokens), self.value(tokens)


def grpo(per_row: bool) -> tuple[nn.Module, GRPOObjective, list[Row]]:
    model = policy()
    return model, GRPOObjective(LogProbs(model, 0.8), EPSILON, KL_COEFF, per_row), answered(8)


def ppo() -> tuple[nn.Module, PPOObjective, list[Row]]:
    torch.manual_seed(0)
    model = PolicyAndValue()
    return model, PPOObjective(LogProbs(model.policy)), estimated(8)


@pytest.mark.parametrize("kind", ["tokens", "rows", "ppo"])
def test_every_split_of_a_mini_batch_is_the_same(kind: str) -> None:
    model, objective, rows = ppo() if kind == "ppo" else grpo(per_row=kind == "rows")
    lengths = {len(row.old) for row in rows}
    assert {1, 20} <= lengths
    found = []
    for size in (8, 4, 2, 1):
        if isinstance(objective, PPOObjective):
            objective.begin(rows)
        model.zero_grad()
        batches = [collate(rows[at : at + size], PADDING) for at in range(0, 8, size)]
        weights = [objective.weight(batch) for batch in batches]
        sums = []
        for batch, weight in zip(batches, weights, strict=True):
            summed = objective.summed_loss(model, batch, weight)
            summed.loss.backward()
            sums.append(torch.stack([summed.loss.detach(), *summed.metrics.values()]))
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((sum(sums) / sum(weights), gradients / sum(weights)))
    assert len(found[0][0]) == 1 + len(objective.metrics)
    for numbers, gradients in found[1:]:
        torch.testing.assert_close(numbers, found[0][0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(gradients, found[0][1], atol=1e-6, rtol=1e-5)


def test_values_of_all_ranks_are_counted() -> None:
    """Each rank divides by the tokens of both, and has other numbers of values for each token."""
    rows = estimated(8)
    objective = PPOObjective(LogProbs(policy()))
    halves = [
        [[len(row.response), len(row.values)] for row in part] for part in (rows[:3], rows[3:])
    ]  # type: ignore[arg-type]
    counts = torch.tensor(halves[0]).sum(0) + torch.tensor(halves[1]).sum(0)
    batch = collate(rows, PADDING)
    weight = objective.weight(batch)

    def value_loss(batch: Any) -> torch.Tensor:
        outputs = batch["old"], batch["values"][..., None] + 1
        found = objective.summed_loss(lambda tokens: outputs, batch, weight)
        assert found.metrics is not None
        return found.metrics["value_loss"]

    objective.begin(rows)
    whole = value_loss(batch)
    parts = []
    for part in (rows[:3], rows[3:]):
        objective.begin(part, lambda here: counts)
        parts.append(value_loss(collate(part, PADDING)))
    torch.testing.assert_close(sum(parts), whole, atol=0.0, rtol=1e-5)


def test_a_rollout_with_one_step_needs_no_old_log_probs_and_no_reference() -> None:
    """The policy is the one that generated: its ratio is 1, whatever rounding there is."""
    model, objective, rows = grpo(False)
    for row in rows:
        row.old = row.reference = None
    batch = collate(rows, PADDING)
    assert "old" not in batch and "reference" not in batch
    found = means(objective.summed_loss(model, batch, 1), objective.weight(batch))
    assert (found["ratios"], found["kl_loss"], found["approx_policy_kl"]) == (1.0, 0.0, 0.0)


def test_rows_of_equal_rewards_count_and_change_nothing() -> None:
    model = policy()
    objective, rows = GRPOObjective(LogProbs(model), EPSILON, kl_coeff=0.0), answered(2)
    for row in rows:
        row.advantages = 0.0
    batch = collate(rows, PADDING)
    found = objective.summed_loss(model, batch, objective.weight(batch))
    found.loss.backward()
    assert objective.weight(batch) > 0 and float(found.loss.detach()) == 0.0
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
