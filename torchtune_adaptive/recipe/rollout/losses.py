"""The losses of reinforcement learning as objectives: means over the terms of a whole mini-batch.

torchtune's are means over micro-batches and ranks of such means, so where responses differ in length, they
depend on how rows are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from torchtune_adaptive.core import Batch, Forward, Summed
from torchtune_adaptive.recipe.rollout.advantages import Total, of_this_rank
from torchtune_adaptive.recipe.rollout.projection import LogProbs
from torchtune_adaptive.recipe.rollout.rows import Row


class _Policy(NamedTuple):
    """What becomes of each token of responses by an update; 0 elsewhere, or harmless."""

    now: torch.Tensor
    gain: torch.Tensor
    """The advantage times the ratio of probabilities, as far as it is not clipped."""
    metrics: dict[str, torch.Tensor]


class GRPO:
    """Group relative policy optimization, of batches that ``rows.collate`` makes.

    Without ``old`` in batches, the policy is taken for the one that generated them: their ratio is exactly 1.
    Without ``reference``, there is no divergence from it.

    Args:
        log_probs: those of the policy, which is trained.
        epsilon: how far from 1 a ratio counts.
        kl_coeff: the price of the divergence from the reference.
        per_row: False for torchtune's ``GRPOLoss``, a mean over tokens; True for its ``GRPOSimpleLoss`` and
            those in chunks, a mean over rows of means over tokens, which never look at ``old``.
        frozen: the reference.
    """

    ignored = 0
    metrics: Sequence[str] = ("policy_loss", "kl_loss", "ratios", "clipfrac", "approx_policy_kl")

    def __init__(
        self,
        log_probs: LogProbs,
        epsilon: float = 0.1,
        kl_coeff: float = 0.1,
        per_row: bool = False,
        frozen: Sequence[nn.Module] = (),
    ) -> None:
        self.frozen = frozen
        self.unit = "rows" if per_row else "tokens"
        self._log_probs = log_probs
        self._epsilon = epsilon
        self._kl_coeff = kl_coeff
        self._per_row = per_row

    def rows(self, batch: Batch) -> int:
        return len(batch["tokens"])

    def weight(self, batch: Batch) -> int:
        return self.rows(batch) if self._per_row else int(batch["response"].sum())

    def summed_loss(self, forward: Forward, batch: Batch, weight: int) -> Summed:
        with self._log_probs.replacing_logits(batch["tokens"]):
            now = forward(batch["tokens"])
        policy = _policy(now, batch, self._epsilon, behind=self._per_row)
        away = batch.get("reference", policy.now) - policy.now
        kl = away.exp() - away - 1
        share = batch["response"].float()
        if self._per_row:
            share = share / share.sum(1, keepdim=True).clamp_min(1)
        made = {"policy_loss": policy.gain.detach(), "kl_loss": kl.detach(), **policy.metrics}
        metrics = {name: (numbers * share).sum() for name, numbers in made.items()}
        return Summed(((self._kl_coeff * kl - policy.gain) * share).sum(), metrics=metrics)


class PPO:
    """Proximal policy optimization of a policy and a value model, of batches that ``rows.collate`` makes.

    What is trained gives the outputs of both: logits, and a value for each position.

    Args:
        log_probs: those of the policy.
        epsilon: how far from 1 a ratio counts.
        value_clip_range: how far from an old value a new one counts.
        value_coeff: the part of the value model's loss.
        frozen: the reference and the reward model.
    """

    unit = "tokens"
    ignored = 0
    metrics: Sequence[str] = ("policy_loss", "value_loss", "ratios", "clipfrac", "approx_policy_kl")

    def __init__(
        self,
        log_probs: LogProbs,
        epsilon: float = 0.1,
        value_clip_range: float = 0.2,
        value_coeff: float = 0.1,
        frozen: Sequence[nn.Module] = (),
    ) -> None:
        self.frozen = frozen
        self._log_probs = log_probs
        self._epsilon = epsilon
        self._value_clip_range = value_clip_range
        self._value_coeff = value_coeff
        self._tokens_per_value = 1.0

    def begin(self, rows: Sequence[Row], total: Total = of_this_rank) -> None:
        """Begin a mini-batch, before it is split.

        Its loss is the sum of two means, over tokens and over values, and there are more values. A step
        divides by the number of tokens, so the sum over values is scaled by what that is too much.

        Args:
            rows: those of the mini-batch on this rank.
            total: the function that sums a tensor over all ranks.
        """
        counts = [[len(each) for each in (row.response, row.values)] for row in rows]  # type: ignore[arg-type]
        tokens, values = total(torch.tensor(counts).sum(0)).tolist()
        self._tokens_per_value = tokens / values

    def rows(self, batch: Batch) -> int:
        return len(batch["tokens"])

    def weight(self, batch: Batch) -> int:
        return int(batch["response"].sum())

    def summed_loss(self, forward: Forward, batch: Batch, weight: int) -> Summed:
        with self._log_probs.replacing_logits(batch["tokens"]):
            now, values = forward(batch["tokens"])
        policy = _policy(now, batch, self._epsilon)
        value_loss = self._value_loss(values[..., 0].float(), batch) * self._tokens_per_value
        tokens = batch["response"]
        policy_loss = -(policy.gain * tokens).sum()
        metrics = {name: (numbers * tokens).sum() for name, numbers in policy.metrics.items()}
        metrics |= {"policy_loss": policy_loss.detach(), "value_loss": value_loss.detach()}
        return Summed(policy_loss + self._value_coeff * value_loss, metrics=metrics)

    def _value_loss(self, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Summed over values; the worse of the clipped and the other counts."""
        old, clip = batch["values"], self._value_clip_range
        held = values.clamp(old - clip, old + clip)
        errors = torch.maximum(*((each - batch["returns"]).square() for each in (values, held)))
        return 0.5 * (errors * batch["valued"]).sum()


def _policy(now: torch.Tensor, batch: Batch, epsilon: float, behind: bool = False) -> _Policy:
    """What becomes of tokens.

    Args:
        now: the log-probabilities of the policy at all positions.
        batch: that of ``now``.
        epsilon: how far from 1 a ratio counts.
        behind: whether the ratio is to the same policy, whatever the batch says.
    """
    now = now.masked_fill(~batch["response"], 0.0)  # elsewhere, ratios might be infinite
    same = now.detach()
    old = batch.get("old", same)
    ratio = (now - (same if behind else old)).exp()
    advantages = batch["advantages"]
    free, held = advantages * ratio, advantages * ratio.clamp(1 - epsilon, 1 + epsilon)
    metrics = {
        "ratios": ratio.detach(),
        "clipfrac": (held < free).float(),
        "approx_policy_kl": 0.5 * (same - old).square(),
    }
    return _Policy(now, torch.minimum(held, free), metrics)
