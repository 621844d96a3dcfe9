"""What a kind of recipe is: everything in which one differs from the others, and nothing else.

All kinds are extensions of two, which are here: ``Full`` and ``LoRA``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torchtune import training
from torchtune.modules.peft import disable_adapter

from torchtune_adaptive.core import NextTokenPrediction, Objective
from torchtune_adaptive.recipe.checkpoints.checkpoints import Checkpoints
from torchtune_adaptive.recipe.checkpoints.weights import AdapterWeights, AllWeights
from torchtune_adaptive.recipe.data.few_lengths import FewLengths
from torchtune_adaptive.recipe.data.rows import Rows, TokenRows
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.environment import Environment
from torchtune_adaptive.recipe.setup.model import (
    AS_IT_IS,
    Model,
    Sharding,
    announce,
    frozen_model,
    full_model,
    load_full,
    load_lora,
    lora_model,
)
from torchtune_adaptive.recipe.setup.offloading import Offloading
from torchtune_adaptive.recipe.setup.optimizer import build_loss
from torchtune_adaptive.recipe.upstream import labels_are_shifted


class RecipeKind(ABC):
    """How one kind of recipe trains a config, on one rank.

    A run and a prediction use the same object, the latter without weights. ``by_name`` lists the kinds.
    """

    def __init__(self, asked: Asked, environment: Environment) -> None:
        self.asked = asked
        self.epochs: int = asked["epochs"]
        """The epochs of the run, which sets it where the config does not say."""
        self.environment = environment

    # --- models -----------------------------------------------------------------------------------

    @abstractmethod
    def checkpoints(self) -> Checkpoints:
        """What a run starts from, and what it saves."""

    @abstractmethod
    def model_without_weights(self, sharding: Sharding = AS_IT_IS) -> nn.Module:
        """The model that is trained, sharded, but still on the meta device."""

    @abstractmethod
    def load(self, model: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Give the model the weights of a checkpoint."""

    def model(self, checkpoint: dict[str, Any]) -> Model:
        """The model that is trained, with the weights of a checkpoint."""
        asked, environment, started = self.asked, self.environment, time.perf_counter()
        model = self.model_without_weights()
        self.load(model, checkpoint)
        offloading = Offloading(model, asked["enable_activation_offloading"])
        announce(model, environment, started)
        same, ranks = asked.sharers, environment.ranks
        return Model(model, offloading, ranks.rank // same, ranks.size // same)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Change the model that is trained while it is on the meta device and not yet sharded."""
        return model

    def frozen(self, weights: Sequence[dict[str, Any]]) -> tuple[nn.Module, ...]:
        """The models that are used and not trained, in the order of ``Kind.frozen``."""
        started = time.perf_counter()
        models = self.frozen_without_weights()
        for model, loaded, keys in zip(models, weights, self.asked.kind.frozen, strict=True):
            load_full(model, self.asked, self.environment, loaded, keys)
            announce(model, self.environment, started)
        return models

    def frozen_without_weights(self, sharding: Sharding = AS_IT_IS) -> tuple[nn.Module, ...]:
        """The same, sharded, but still on the meta device."""
        asked, blocks = self.asked, [each.model for each in self.asked.kind.frozen]
        return tuple(frozen_model(asked, self.environment, block, sharding) for block in blocks)

    # --- training ---------------------------------------------------------------------------------

    def objective(self, model: nn.Module, frozen: Sequence[nn.Module]) -> Objective:
        """What is minimized: the loss of a micro-batch, its weight, its metrics."""
        loss_fn = build_loss(self.asked, self.environment, model)
        split = self.environment.context is not None  # those of parts of rows are always shifted
        return NextTokenPrediction(loss_fn, shifted=split or labels_are_shifted())

    def before_step(self, model: nn.Module, number: int) -> None:  # noqa: B027 - nothing to do
        """Change the model as training proceeds; called before each step with its number, counted from 1.

        A search and a prediction do not call it. So the model is built as it is when it needs most memory.
        """

    # --- data -------------------------------------------------------------------------------------

    def rows(self) -> Rows:
        """What the samples are like."""
        context = self.environment.context
        return TokenRows(
            packed=self.asked.packed(),
            parts=context.parts if context else None,
            lengths=FewLengths.of(self.asked),
        )


class Full(RecipeKind):
    """Full finetuning: every weight is trained."""

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.asked, self.environment, self.epochs, AllWeights())

    def model_without_weights(self, sharding: Sharding = AS_IT_IS) -> nn.Module:
        return full_model(self.asked, self.environment, self.prepare, sharding)

    def load(self, model: nn.Module, checkpoint: dict[str, Any]) -> None:
        load_full(model, self.asked, self.environment, checkpoint[training.MODEL_KEY])


class LoRA(RecipeKind):
    """LoRA, DoRA and QLoRA finetuning: adapters are trained, the model stays as it is."""

    def checkpoints(self) -> Checkpoints:
        weights = AdapterWeights(self.asked)
        return Checkpoints(self.asked, self.environment, self.epochs, weights)

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
