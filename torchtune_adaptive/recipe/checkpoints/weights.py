"""The weights of a model, as they are trained and as torchtune's checkpointers expect them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torchtune import training
from torchtune.modules.peft import (
    get_adapter_state_dict,
    get_lora_module_names,
    get_merged_lora_ckpt,
)

from torchtune_adaptive.recipe.settings.asked import Asked


class Weights(ABC):
    """Which of a model's weights are saved, and how."""

    adapters_only = False

    @abstractmethod
    def trained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Those of the model's weights that are trained, by torchtune's key for them."""

    @abstractmethod
    def merged(self, weights: dict[str, Any]) -> dict[str, Any]:
        """The weights of the trained model, of all of it or of whole layers; changes what it is given."""

    @abstractmethod
    def adapters(self, weights: dict[str, Any]) -> dict[str, Any]:
        """What the checkpointer expects of adapters, if the model has some."""

    def parts(self, weights: dict[str, Any]) -> dict[str, Any]:
        """All that the checkpointer expects; changes what it is given."""
        parts = self.adapters(weights)
        if not self.adapters_only:
            parts[training.MODEL_KEY] = self.merged(weights)
        return parts


class AllWeights(Weights):
    """Those of a model that is trained as a whole."""

    def trained(self, weights: dict[str, Any]) -> dict[str, Any]:
        return {training.MODEL_KEY: weights}

    def merged(self, weights: dict[str, Any]) -> dict[str, Any]:
        return weights

    def adapters(self, weights: dict[str, Any]) -> dict[str, Any]:
        return {}


class AdapterWeights(Weights):
    """Those of adapters, and of the model that they are merged into."""

    def __init__(self, asked: Asked) -> None:
        self.adapters_only = asked["save_adapter_weights_only"]
        model = asked.cfg.model
        self._config = {
            "r": model.lora_rank,
            "lora_alpha": model.lora_alpha,
            "target_modules": get_lora_module_names(
                list(model.lora_attn_modules),
                model.apply_lora_to_mlp,
                model.get("apply_lora_to_output", False),
            ),
            "peft_type": "LORA",
        }

    def trained(self, weights: dict[str, Any]) -> dict[str, Any]:
        return {training.ADAPTER_KEY: get_adapter_state_dict(weights, device=None)}

    def merged(self, weights: dict[str, Any]) -> dict[str, Any]:
        merged: dict[str, Any] = get_merged_lora_ckpt(
            weights, rank=self._config["r"], alpha=self._config["lora_alpha"]
        )
        return merged

    def adapters(self, weights: dict[str, Any]) -> dict[str, Any]:
        return {**self.trained(weights), training.ADAPTER_CONFIG: dict(self._config)}
