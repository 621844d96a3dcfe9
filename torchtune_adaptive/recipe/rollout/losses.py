"""The losses of reinforcement learning as objectives: means over the terms of a whole mini-batch.

torchtune's are means over micro-batches and ranks of such means, so where responses differ in length, they
depend on how rows are split. Batches are those of ``rows.collate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from torchtune_adaptive.core import Batch, Forward, Summed
from torchtune_adaptive.recipe.rollout.judging import Total, of_this_rank
from torchtune_adaptive.recipe.rollout.projection import LogProbs
from torchtune_adaptive.recipe.rollout.rows import Row, known


@dataclass(eq=False)
class _Clipped:
    """What both objectives have in common: advantages times clipped ratios of probabilities."""

    log_probs: LogProbs
    """Those of the policy, which is trained."""
    epsilon: float = 0.1
    """How far from 1 a ratio counts."""

    unit = "tokens"
    ignored = 0

    def begin(self, rows: Sequence[Row], total: Total = of_this_rank) -> None:
        """Begin a mini-batch of these rows on this rank, before it is split."""

    def rows(self, batch: Batch) -> int:
        return len(batch["tokens"])

    def weight(self, batch: Batch) -> int:
        return int(batch["response"].sum())

    def gains(
        self, now: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What is gained at each position, to be maximized; and what is logged."""
        ratio = (now - old).exp()
        free = advantages * ratio
        held = advantages * ratio.clamp(1 - self.epsilon, 1 + self.epsilon)
        logged = {"ratios": ratio.detach(), "clipfrac": (held < free).float()}
        return torch.minimum(held, free), logged


@dataclass(eq=False)
class GRPOObjective(_Clipped):
    """Group relative policy optimization.

    Without ``old`` in batches, the policy is the one that generated them, so their ratio is 1, in spite of
    rounding. Without ``reference``, there is no divergence from it.
    """

    kl_coeff: float = 0.1
    """The price of the divergence from the reference."""
    per_row: bool = False
    """False for torchtune's ``GRPOLoss``, a mean over tokens. True for its ``GRPOSimpleLoss`` and those in
    chunks: means over rows of means over their tokens, with ratios of 1."""
    frozen: Sequence[nn.Module] = ()
    """The reference."""

    metrics: Sequence[str] = field(
        init=False, default=("policy_loss", "kl_loss", "ratios", "clipfrac", "approx_policy_kl")
    )

    def __post_init__(self) -> None:
        self.unit = "rows" if self.per_row else "tokens"

    def weight(self, batch: Batch) -> int:
        return self.rows(batch) if self.per_row else super().weight(batch)

    def summed_loss(self, forward: Forward, batch: Batch, weight: int) -> Summed:
        with self.log_probs.replacing_logits(batch["tokens"]):
            now = _of_response(forward(batch["tokens"]), batch)
        same = now.detach()
        old = batch.get("old", same)
        gains, logged = self.gains(now, same if self.per_row else old, batch["advantages"])
        away = batch.get("reference", same) - now
        kl = away.exp() - away - 1
        share = batch["response"].float()
        if self.per_row:
            share = share / share.sum(1, keepdim=True).clamp_min(1)
        logged |= {"policy_loss": gains.detach(), "kl_loss": kl.detach()}
        logged |= {"approx_policy_kl": 0.5 * (same - old).square()}
        metrics = {name: (numbers * share).sum() for name, numbers in logged.items()}
        return Summed(((self.kl_coeff * kl - gains) * share).sum(), metrics=metrics)


@dataclass(eq=False)
class PPOObjective(_Clipped):
    """Proximal policy optimization of a policy and a value model.

    What is trained gives the outputs of both: logits, and a value for each position.
    """

    value_clip_range: float = 0.2
    """How far from an old value a new one counts."""
    value_coeff: float = 0.1
    """The part of the value model's loss."""
    frozen: Sequence[nn.Module] = ()
    """The reference and the reward model."""

    metrics: Sequence[str] = field(
        init=False, default=("policy_loss", "value_loss", "ratios", "clipfrac", "approx_policy_kl")
    )

    def __post_init__(self) -> None:
        self._tokens_per_value = 1.0

    def begin(self, rows: Sequence[Row], total: Total = of_this_rank) -> None:
        # The loss is the sum of two means, over tokens and over values, and there are more values. A step
        # divides by the number of tokens, so the sum over values is scaled.
        counts = [[len(known(each)) for each in (row.response, row.values)] for row in rows]
        # A rank may have no rows.
        counted = torch.tensor(counts, dtype=torch.int64).reshape(-1, 2)
        tokens, values = total(counted.sum(0)).tolist()
        self._tokens_per_value = tokens / values

    def summed_loss(self, forward: Forward, batch: Batch, weight: int) -> Summed:
        with self.log_probs.replacing_logits(batch["tokens"]):
            now, values = forward(batch["tokens"])
        now = _of_response(now, batch)
        gains, logged = self.gains(now, batch["old"], batch["advantages"])
        logged |= {"approx_policy_kl": 0.5 * (now.detach() - batch["old"]).square()}
        tokens = batch["response"]
        policy_loss = -(gains * tokens).sum()
        value_loss = self._value_loss(values[..., 0].float(), batch) * self._tokens_per_value
        metrics = {name: (numbers * tokens).sum() for name, numbers in logged.items()}
        metrics |= {"policy_loss": policy_loss.detach(), "value_loss": value_loss.detach()}
        return Summed(policy_loss + self.value_coeff * value_loss, metrics=metrics)

    def _value_loss(self, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Summed over values, of which the worse counts: as it is, or clipped."""
        old, returns, clip = batch["values"], batch["returns"], self.value_clip_range
        held = values.clamp(old - clip, old + clip)
        errors = torch.maximum((values - returns).square(), (held - returns).square())
        return 0.5 * (errors * batch["valued"]).sum()


def _of_response(now: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Log-probabilities, and 0 where they do not count: ratios might be infinite there."""
    return now.masked_fill(~batch["response"], 0.0)
