"""The losses of reinforcement learning as objectives: sums over terms of the whole mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from torchtune_adaptive.core import Batch, Forward, Summed
from torchtune_adaptive.recipe.rollout.projection import LogProbs
from torchtune_adaptive.recipe.rollout.rows import Row


class GRPO:
    """Group relative policy optimization, over batches of ``rows.collate``.

    Args:
        log_probs: those of the model that is trained.
        epsilon: the range in which ratios are not clipped.
        kl_coeff: the part of the divergence from the reference in the loss.
        per_row: whether each row counts as much as any other (``GRPOSimpleLoss`` of torchtune, and those in
            chunks, all without clipping); otherwise each token does (``GRPOLoss``).
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

    def rows(self, batch: Batch) -> int:
        return len(batch["tokens"])

    def weight(self, batch: Batch) -> int:
        raise NotImplementedError

    def summed_loss(self, forward: Forward, batch: Batch, weight: int) -> Summed:
        raise NotImplementedError


class PPO:
    """Proximal policy optimization of a policy and a value model, which ``forward`` gives both outputs of.

    Args:
        log_probs: those of the policy that is trained.
        epsilon: the range in which ratios are not clipped.
        value_clip_range: the range in which new values may differ from old ones.
        value_coeff: the part of the value's loss.
        frozen: the reference and the reward model.
    """

    unit = "tokens"
    ignored = 0
    metrics: Sequence[str] = (
        "policy_loss",
        "value_loss",
        "ratios",
        "clipfrac",
        "approx_policy_kl",
    )

    def __init__(
        self,
        log_probs: LogProbs,
        epsilon: float = 0.1,
        value_clip_range: float = 0.2,
        value_coeff: float = 0.1,
        frozen: Sequence[nn.Module] = (),
    ) -> None:
        self.frozen = frozen

    def begin(
        self,
        rows: Sequence[Row],
        total: Callable[[torch.Tensor], torch.Tensor] = lambda counts: counts,
    ) -> None:
        """Begin a mini-batch, before it is split: count the terms of policy and value, which differ.

        Args:
            rows: those of the mini-batch on this rank.
            total: the function that sums a tensor over all ranks.
        """
        raise NotImplementedError

    def rows(self, batch: Batch) -> int:
        return len(batch["tokens"])

    def weight(self, batch: Batch) -> int:
        raise NotImplementedError

    def summed_loss(self, forward: Forward, batch: Batch, weight: int) -> Summed:
        raise NotImplementedError
