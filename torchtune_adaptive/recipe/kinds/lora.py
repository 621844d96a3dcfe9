"""LoRA, DoRA and QLoRA finetuning: adapters are trained, the model stays as it is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torchtune import training

from torchtune_adaptive.recipe.checkpoints.checkpoints import Checkpoints, LoRACheckpoints
from torchtune_adaptive.recipe.kinds.recipe_kind import RecipeKind
from torchtune_adaptive.recipe.setup.model import (
    AS_IT_IS,
    Model,
    lora_model,
    lora_model_without_weights,
)


class LoRA(RecipeKind):
    """Trains adapters."""

    def checkpoints(self) -> Checkpoints:
        return LoRACheckpoints(self.about, self.cfg, self.environment)

    def model(self, checkpoint: dict[str, Any]) -> Model:
        weights, adapters = checkpoint[training.MODEL_KEY], checkpoint.get(training.ADAPTER_KEY)
        return lora_model(self.cfg, self.environment, weights, adapters, self.prepare)

    def model_without_weights(self, sharding: AbstractContextManager[Any] = AS_IT_IS) -> nn.Module:
        return lora_model_without_weights(self.cfg, self.environment, sharding, self.prepare)


TheKind = LoRA
