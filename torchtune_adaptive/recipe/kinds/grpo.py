"""Group relative policy optimization (GRPO): of all weights, or of adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchtune_adaptive.core import Objective
from torchtune_adaptive.recipe.kinds.generating import Generating
from torchtune_adaptive.recipe.kinds.recipe_kind import Full, LoRA, without_adapters
from torchtune_adaptive.recipe.rewards import Rewards
from torchtune_adaptive.recipe.rollout.judging import ByFunctions, Judge
from torchtune_adaptive.recipe.rollout.losses import GRPOObjective
from torchtune_adaptive.recipe.rollout.phases import stop_tokens
from torchtune_adaptive.recipe.rollout.score import OfTokens, Scorers


@dataclass(frozen=True)
class GRPOLoss:
    """Clipped ratios, a mean over the tokens of all responses."""

    epsilon: float = 0.1
    """The range in which ratios are not clipped."""
    kl_coeff: float = 0.1
    """The part of the divergence from the reference in the loss."""


@dataclass(frozen=True)
class GRPOSimpleLoss:
    """A mean over responses, each of which counts the same; ratios are not clipped."""

    epsilon: float = 0.1
    """Not used, as in torchtune's."""
    kl_coeff: float = 0.1


@dataclass(frozen=True)
class GRPOWithChunkedOutputLoss(GRPOSimpleLoss):
    """The same: here logits are always in chunks."""

    num_output_chunks: int = 8
    """Not used."""


_PER_ROW = {"GRPOLoss": False, "GRPOSimpleLoss": True, "GRPOWithChunkedOutputLoss": True}
"""Losses of torchtune's main branch, and whether rows or tokens count the same."""


class GRPO(Generating):
    """Makes the better ones of several responses to a prompt more likely."""

    def objective(self, model: nn.Module, frozen: Sequence[nn.Module]) -> Objective:
        loss = self.loss("torchtune.dev.grpo.loss", *_PER_ROW)
        per_row = _PER_ROW[type(loss).__name__]
        return GRPOObjective(self.log_probs(model), loss.epsilon, loss.kl_coeff, per_row, frozen)

    def scorers(self, model: nn.Module, objective: Objective) -> Scorers:
        assert isinstance(objective, GRPOObjective)
        log_probs = {"reference": self.reference(model, objective.frozen)}
        if self.asked["ppo_epochs"] > 1 and not objective.per_row:
            # Otherwise the policy that is trained is the one that has generated, and their ratio is 1.
            log_probs = {"old": self.log_probs(model), **log_probs}
        return Scorers(log_probs, {})

    def reference(self, model: nn.Module, frozen: Sequence[nn.Module]) -> OfTokens:
        """The log-probabilities of the policy that the trained one is not to move away from."""
        [reference] = frozen
        return self.log_probs(reference)

    def judge(self, tokenizer: Any, entering: Callable[[str], None]) -> Judge:
        stops = stop_tokens(self.asked, tokenizer)
        rewards = Rewards(self.asked, tokenizer, stops, entering)
        return ByFunctions(rewards, self.asked["grpo_samples"])


class FullGRPO(GRPO, Full):
    """Trains every weight; the reference is a second model."""


class LoRAGRPO(GRPO, LoRA):
    """Trains adapters; without them, the model is the reference."""

    def reference(self, model: nn.Module, frozen: Sequence[nn.Module]) -> OfTokens:
        return without_adapters(model, self.log_probs(model))
