"""What a kind of recipe is: everything in which one differs from the others, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from omegaconf import DictConfig
from torch import nn

from torchtune_adaptive.core import NextTokenPrediction, Objective
from torchtune_adaptive.recipe.checkpoints.checkpoints import Checkpoints
from torchtune_adaptive.recipe.data.rows import Rows, TokenRows
from torchtune_adaptive.recipe.settings.kinds import Kind, is_packed
from torchtune_adaptive.recipe.setup.environment import Environment
from torchtune_adaptive.recipe.setup.model import (
    AS_IT_IS,
    Model,
    frozen_model,
    frozen_model_without_weights,
)
from torchtune_adaptive.recipe.setup.optimizer import build_loss
from torchtune_adaptive.recipe.upstream import labels_are_shifted


class RecipeKind(ABC):
    """How one kind of recipe trains a config, on one rank.

    A run and a prediction use the same object, the latter without weights. Each kind has a module of its own,
    with a subclass ``TheKind``.
    """

    def __init__(self, about: Kind, cfg: DictConfig, environment: Environment) -> None:
        self.about = about
        self.cfg = cfg
        self.environment = environment

    # --- models -----------------------------------------------------------------------------------

    @abstractmethod
    def checkpoints(self) -> Checkpoints:
        """What a run starts from, and what it saves."""

    @abstractmethod
    def model(self, checkpoint: dict[str, Any]) -> Model:
        """The model that is trained, with the weights of a checkpoint."""

    @abstractmethod
    def model_without_weights(self, sharding: AbstractContextManager[Any] = AS_IT_IS) -> nn.Module:
        """The same, sharded, but still on the meta device."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Change the model that is trained while it is on the meta device and not yet sharded."""
        return model

    def frozen(self, weights: Sequence[dict[str, Any]]) -> tuple[nn.Module, ...]:
        """The models that are used and not trained, in the order of ``about.frozen``."""
        return tuple(
            frozen_model(self.cfg, self.environment, each.model, loaded)
            for each, loaded in zip(self.about.frozen, weights, strict=True)
        )

    def frozen_without_weights(
        self, sharding: AbstractContextManager[Any] = AS_IT_IS
    ) -> tuple[nn.Module, ...]:
        """The same, sharded, but still on the meta device."""
        return tuple(
            frozen_model_without_weights(self.cfg, self.environment, each.model, sharding)
            for each in self.about.frozen
        )

    # --- training ---------------------------------------------------------------------------------

    def objective(self, model: nn.Module, frozen: Sequence[nn.Module]) -> Objective:
        """What is minimized: the loss of a micro-batch, its weight, its metrics."""
        loss_fn = build_loss(self.cfg, self.environment, model)
        return NextTokenPrediction(loss_fn, labels_are_shifted())

    def before_step(self, model: nn.Module, number: int) -> None:  # noqa: B027 - nothing to do
        """Change the model as training proceeds; called before each step with its number, counted from 1.

        A search and a prediction do not call it. So the model is built as it is when it needs most memory.
        """

    # --- data -------------------------------------------------------------------------------------

    def rows(self) -> Rows:
        """What the samples are like."""
        return TokenRows(packed=is_packed(self.cfg))


def recipe_kind(about: Kind, cfg: DictConfig, environment: Environment) -> RecipeKind:
    """A kind of recipe for a config."""
    module = import_module(f"torchtune_adaptive.recipe.kinds.{about.name}")
    kind: RecipeKind = module.TheKind(about, cfg, environment)
    return kind
