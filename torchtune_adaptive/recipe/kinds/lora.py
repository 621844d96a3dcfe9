"""LoRA, DoRA and QLoRA finetuning: adapters are trained, the model stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchtune import training
from torchtune.modules.peft import disable_adapter

from torchtune_adaptive.recipe.checkpoints.checkpoints import Checkpoints, LoRACheckpoints
from torchtune_adaptive.recipe.kinds.recipe_kind import RecipeKind
from torchtune_adaptive.recipe.setup.model import AS_IT_IS, Sharding, load_lora, lora_model


class LoRA(RecipeKind):
    """Trains adapters."""

    def checkpoints(self) -> Checkpoints:
        return LoRACheckpoints(self.asked, self.environment, self.epochs)

    def model_without_weights(self, sharding: Sharding = AS_IT_IS) -> nn.Module:
        return lora_model(self.asked, self.environment, self.prepare, sharding)

    def load(self, model: nn.Module, checkpoint: dict[str, Any]) -> None:
        weights, adapters = checkpoint[training.MODEL_KEY], checkpoint.get(training.ADAPTER_KEY)
        load_lora(model, self.asked, self.environment, weights, adapters)


def without_adapters(
    model: nn.Module, of_tokens: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a function of the model says while its adapters are off."""

    def of_base(tokens: torch.Tensor) -> torch.Tensor:
        with disable_adapter(model):
            return of_tokens(tokens)

    return of_base


TheKind = LoRA
