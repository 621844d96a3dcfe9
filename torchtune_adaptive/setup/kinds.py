"""The kinds of recipe, as far as their models are concerned: how each is built, with weights or without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig
from torch import nn
from torchtune import training

from torchtune_adaptive.settings.kinds import Kind, kind_of
from torchtune_adaptive.setup.environment import Environment
from torchtune_adaptive.setup.model import (
    AS_IT_IS,
    Model,
    full_model,
    full_model_without_weights,
    lora_model,
    lora_model_without_weights,
)


@dataclass(frozen=True)
class RecipeKind:
    """How one kind of recipe makes its model.

    Args:
        build: from a checkpoint's dictionary, as the checkpointer loads it.
        build_without_weights: sharded, but still on the meta device.
    """

    build: Callable[[DictConfig, Environment, dict[str, Any]], Model]
    build_without_weights: Callable[
        [DictConfig, Environment, AbstractContextManager[Any]], nn.Module
    ]


def _full(cfg: DictConfig, environment: Environment, checkpoint: dict[str, Any]) -> Model:
    return full_model(cfg, environment, checkpoint[training.MODEL_KEY])


def _full_without_weights(
    cfg: DictConfig, environment: Environment, sharding: AbstractContextManager[Any] = AS_IT_IS
) -> nn.Module:
    return full_model_without_weights(cfg, environment, sharding)[0]


def _lora(cfg: DictConfig, environment: Environment, checkpoint: dict[str, Any]) -> Model:
    adapters = checkpoint.get(training.ADAPTER_KEY)
    return lora_model(cfg, environment, checkpoint[training.MODEL_KEY], adapters)


_KINDS: dict[Kind, RecipeKind] = {
    "full": RecipeKind(_full, _full_without_weights),
    "lora": RecipeKind(_lora, lora_model_without_weights),
}


def recipe_kind(cfg: DictConfig) -> RecipeKind:
    """The kind of recipe that a config is for."""
    return _KINDS[kind_of(cfg)]
