"""Full finetuning: every weight is trained."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torchtune import training

from torchtune_adaptive.recipe.checkpoints.checkpoints import Checkpoints, FullCheckpoints
from torchtune_adaptive.recipe.kinds.recipe_kind import RecipeKind
from torchtune_adaptive.recipe.setup.model import (
    AS_IT_IS,
    Model,
    full_model,
    full_model_without_weights,
)


class Full(RecipeKind):
    """Trains every weight."""

    def checkpoints(self) -> Checkpoints:
        return FullCheckpoints(self.about, self.cfg, self.environment)

    def model(self, checkpoint: dict[str, Any]) -> Model:
        weights = checkpoint[training.MODEL_KEY]
        return full_model(self.cfg, self.environment, weights, self.prepare)

    def model_without_weights(self, sharding: AbstractContextManager[Any] = AS_IT_IS) -> nn.Module:
        return full_model_without_weights(self.cfg, self.environment, sharding, self.prepare)[0]


TheKind = Full
