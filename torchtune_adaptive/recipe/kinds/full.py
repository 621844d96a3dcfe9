"""Full finetuning: every weight is trained."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchtune import training

from torchtune_adaptive.recipe.checkpoints.checkpoints import Checkpoints, FullCheckpoints
from torchtune_adaptive.recipe.kinds.recipe_kind import RecipeKind
from torchtune_adaptive.recipe.setup.model import AS_IT_IS, Sharding, full_model, load_full


class Full(RecipeKind):
    """Trains every weight."""

    def checkpoints(self) -> Checkpoints:
        return FullCheckpoints(self.asked, self.environment, self.epochs)

    def model_without_weights(self, sharding: Sharding = AS_IT_IS) -> nn.Module:
        return full_model(self.asked, self.environment, self.prepare, sharding)

    def load(self, model: nn.Module, checkpoint: dict[str, Any]) -> None:
        load_full(model, self.asked, self.environment, checkpoint[training.MODEL_KEY])


TheKind = Full
