"""Proximal policy optimization (PPO): a policy and a value model are trained, and a reward model judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import nn
from torchtune import training

from torchtune_adaptive.core import Objective
from torchtune_adaptive.recipe.checkpoints.checkpoints import Checkpoints
from torchtune_adaptive.recipe.checkpoints.policy_and_value import (
    POLICY,
    VALUE,
    PolicyAndValue,
    PolicyAndValueCheckpoints,
    of_model,
)
from torchtune_adaptive.recipe.checkpoints.weights import AllWeights
from torchtune_adaptive.recipe.data.rows import Rows
from torchtune_adaptive.recipe.kinds.generating import Generating, Prompts
from torchtune_adaptive.recipe.kinds.recipe_kind import Full
from torchtune_adaptive.recipe.rollout.judging import ByModel, Judge, over
from torchtune_adaptive.recipe.rollout.losses import PPOObjective
from torchtune_adaptive.recipe.rollout.score import Scorers, values_of
from torchtune_adaptive.recipe.settings.keys import VALUE_CHECKPOINTER
from torchtune_adaptive.recipe.settings.kind_table import FrozenModel
from torchtune_adaptive.recipe.setup.model import AS_IT_IS, Sharding, full_model, load_full

_TRAINED = {
    POLICY: FrozenModel("policy_model", "checkpointer"),
    VALUE: FrozenModel("reward_and_value_model", VALUE_CHECKPOINTER),
}
_UNUSED = "output.bias"
"""A weight that some reward models are saved with, and torchtune's do not have."""


class PromptsAlone(Prompts):
    """Prompts without answers."""

    keys: ClassVar[tuple[str, ...]] = ("tokens",)
    values: ClassVar[bool] = True


class PPO(Generating, Full):
    """Makes what is better than the value model has expected more likely."""

    # --- models -----------------------------------------------------------------------------------

    def checkpoints(self) -> Checkpoints:
        return PolicyAndValueCheckpoints(self.asked, self.environment, self.epochs, AllWeights())

    def model_without_weights(self, sharding: Sharding = AS_IT_IS) -> PolicyAndValue:
        policy, value = (
            full_model(self.asked, self.environment, self.prepare, sharding, keys.model)
            for keys in _TRAINED.values()
        )
        return PolicyAndValue(policy, value)

    def load(self, model: nn.Module, checkpoint: dict[str, Any]) -> None:
        for name, keys in _TRAINED.items():
            weights = of_model(name, checkpoint[training.MODEL_KEY])
            weights.pop(_UNUSED, None)
            load_full(model.get_submodule(name), self.asked, self.environment, weights, keys)

    def frozen(self, weights: Sequence[dict[str, Any]]) -> tuple[nn.Module, ...]:
        for each in weights:
            each.pop(_UNUSED, None)
        return super().frozen(weights)

    def policy(self, model: nn.Module) -> nn.Module:
        return model.get_submodule(POLICY)

    # --- training ---------------------------------------------------------------------------------

    def objective(self, model: nn.Module, frozen: Sequence[nn.Module]) -> Objective:
        loss = self.loss("torchtune.rlhf.loss", "PPOLoss")
        clip, coefficient = loss.value_clip_range, loss.value_coeff
        return PPOObjective(
            self.log_probs(self.policy(model)), loss.epsilon, clip, coefficient, frozen
        )

    def scorers(self, model: nn.Module, objective: Objective) -> Scorers:
        reference, reward = objective.frozen
        policies = {"old": self.policy(model), "reference": reference}
        return Scorers(
            {name: self.log_probs(policy) for name, policy in policies.items()},
            {"values": values_of(model.get_submodule(VALUE)), "scores": values_of(reward)},
        )

    def judge(self, tokenizer: Any, entering: Callable[[str], None]) -> Judge:
        asked = self.asked
        return ByModel(
            asked["max_generated_tokens"],
            asked["kl_coeff"],
            asked["gamma"],
            asked["lmbda"],
            penalty=asked["reward_penalty"],
            min_length=asked["min_response_length"],
            must_stop=asked["penalise_no_eos"],
            total=over(self.environment.ranks),
        )

    # --- data -------------------------------------------------------------------------------------

    def rows(self) -> Rows:
        return PromptsAlone()
