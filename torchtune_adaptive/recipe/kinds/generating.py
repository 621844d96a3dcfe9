"""What kinds have in common that train on rows which the model itself generates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn
from torchtune.training import disable_dropout

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.core import Objective
from torchtune_adaptive.recipe.components import make
from torchtune_adaptive.recipe.data.rows import Rows
from torchtune_adaptive.recipe.kinds.recipe_kind import RecipeKind
from torchtune_adaptive.recipe.rollout.judging import Judge
from torchtune_adaptive.recipe.rollout.projection import LogProbs
from torchtune_adaptive.recipe.rollout.prompts import Prompts
from torchtune_adaptive.recipe.rollout.score import Scorers


class Generating(RecipeKind):
    """Trains a model on responses that it has given itself."""

    def prepare(self, model: nn.Module) -> nn.Module:
        disable_dropout(model)  # or log-probabilities would differ from the reference's by chance
        return model

    def policy(self, model: nn.Module) -> nn.Module:
        """The model that generates, in what is trained."""
        return model

    def loss(self, module: str, *known: str) -> Any:
        """What the config's ``loss`` makes: one of the known losses of a module of torchtune, or of ours."""
        made, component = make(self.asked.cfg.loss, "loss"), self.asked.cfg.loss._component_
        if type(made).__name__ not in known:
            reason = "is not a loss that this recipe knows"
            raise ConfigError(
                "loss._component_", component, reason, f"Use {' or '.join(known)} of {module}"
            )
        return made

    def log_probs(self, policy: nn.Module) -> LogProbs:
        """The log-probabilities of a policy, which samples at the temperature of the config."""
        return LogProbs(policy, self.asked["temperature"])

    def rows(self) -> Rows:
        return Prompts()

    @abstractmethod
    def scorers(self, model: nn.Module, objective: Objective) -> Scorers:
        """What scores the rows of a rollout, which are trained for an objective."""

    @abstractmethod
    def judge(self, tokenizer: Any, entering: Callable[[str], None]) -> Judge:
        """What rewards them, and finds their advantages. It calls ``entering`` with the name of each reward
        function, before it calls that."""
