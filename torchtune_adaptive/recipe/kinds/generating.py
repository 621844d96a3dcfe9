"""What kinds have in common that train on rows which the model itself generates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torchtune.training import disable_dropout

from torchtune_adaptive.common import ConfigError, counted
from torchtune_adaptive.core import Objective, Phase, TrainStep
from torchtune_adaptive.recipe.components import make
from torchtune_adaptive.recipe.data.rows import Collate, Row, Rows
from torchtune_adaptive.recipe.kinds.recipe_kind import RecipeKind
from torchtune_adaptive.recipe.rollout.generate import Generation
from torchtune_adaptive.recipe.rollout.judging import Judge
from torchtune_adaptive.recipe.rollout.phases import Phases, RolloutSizes, stop_tokens
from torchtune_adaptive.recipe.rollout.projection import LogProbs
from torchtune_adaptive.recipe.rollout.rows import collate, longest_rows
from torchtune_adaptive.recipe.rollout.score import Scorers, Scoring
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.phase_names import GENERATION, SCORING


class Prompts(Rows):
    """Prompts. Batches are not made of them, but of the rows that are generated from them."""

    sample = "prompt"
    keys: ClassVar[tuple[str, ...]] = ("tokens", "answer")
    values: ClassVar[bool] = False
    """Whether the rows that are generated from them have values."""

    def length(self, row: Row) -> int:
        return len(row["tokens"])

    def stretched(self, row: Row, length: int) -> Row:
        return {**row, "tokens": (list(row["tokens"]) * length)[:length]}

    def collate(self, asked: Asked, tokenizer: Any, objective: Any) -> Collate:
        return partial(collate, padding_id=tokenizer.pad_id)

    def imagined(self, rows: int, length: int, simulated: bool) -> dict[str, torch.Tensor]:
        # Of a row that is generated, only the length of all of it counts.
        return collate(longest_rows(rows, length - 1, 1, self.values), padding_id=0)


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

    def phases(
        self, model: nn.Module, step: TrainStep, tokenizer: Any, sizes: RolloutSizes, longest: int
    ) -> Phases:
        """The phases of a run, which have no size yet; the longest prompt has ``longest`` tokens.

        Raises:
            ConfigError: the longest prompt leaves no room for a response.
        """
        policy, scorers = self.policy(model), self.scorers(model, step.objective)
        models = (policy, *step.objective.frozen)
        lengths = [getattr(model, "max_seq_len", None) for model in models]
        most = min((length for length in lengths if length is not None), default=None)
        if most is not None and longest + sizes.max_new > most:
            raise ConfigError(
                "max_generated_tokens",
                sizes.max_new,
                f"is too much: the longest prompt has {counted(longest, 'token')}, and the model takes "
                f"{most}",
                f"Set it to {most - longest} or less, or leave out long prompts (dataset.filter_fn)"
                if most > longest
                else "Leave out prompts that long (dataset.filter_fn)",
            )
        generator = Generation(
            policy,
            tokenizer.pad_id,
            stop_tokens(self.asked, tokenizer),
            sizes.max_new,
            self.asked["temperature"],
            self.asked["top_k"],
            longest,
            self.environment.dtype,
            step.device,
        )
        sharded = step.ranks.size > 1
        return Phases(
            Phase(
                GENERATION,
                step,
                generator.alone,
                gathers=policy if sharded else None,
                sharded=generator.together if sharded else None,
                tried=generator.trial,
                shape=len,
                advice=f"Lower max_generated_tokens, or leave out long prompts; see {BLOCK}.memory_limit.",
            ),
            generator,
            Phase(SCORING, step, Scoring(tokenizer.pad_id, step.device, *scorers), shape=len),
            sizes,
            longest,
            bool(scorers.values),
        )

    @abstractmethod
    def judge(self, tokenizer: Any, entering: Callable[[str], None]) -> Judge:
        """What rewards them, and finds their advantages. It calls ``entering`` with the name of each reward
        function, before it calls that."""
