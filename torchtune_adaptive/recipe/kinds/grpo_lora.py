"""GRPO of adapters; without them, the model is the reference."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from torchtune_adaptive.recipe.kinds.grpo import GRPO
from torchtune_adaptive.recipe.kinds.lora import LoRA, without_adapters
from torchtune_adaptive.recipe.rollout.score import OfTokens


class LoRAGRPO(GRPO, LoRA):
    """Trains adapters."""

    def reference(self, model: nn.Module, frozen: Sequence[nn.Module]) -> OfTokens:
        return without_adapters(model, self.log_probs(model))


TheKind = LoRAGRPO
