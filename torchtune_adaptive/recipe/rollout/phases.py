"""The phases of a rollout besides training: what generates rows, and what scores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from torchtune_adaptive.common import ConfigError, counted
from torchtune_adaptive.core import Phase, TrainStep
from torchtune_adaptive.recipe.rollout.generate import Generation
from torchtune_adaptive.recipe.rollout.score import Scorers, Scoring
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.phase_names import GENERATION, SCORING
from torchtune_adaptive.recipe.setup.environment import Environment


@dataclass(frozen=True)
class RolloutSizes:
    """What a rollout is made of. It is part of the training, and nothing changes it."""

    prompts: int
    """Prompts on each rank."""
    samples: int
    """Responses to each prompt."""
    epochs: int
    """Times that its rows are trained on."""
    max_new: int
    """Tokens of the longest response."""
    mini_batch: int | None = None
    """Rows of a step on each rank; None for all of them."""

    @property
    def rows(self) -> int:
        """Rows on each rank."""
        return self.prompts * self.samples

    @property
    def step_rows(self) -> int:
        """Rows of a step on each rank."""
        return self.mini_batch or self.rows

    @property
    def trained_rows(self) -> int:
        """Rows that each rank trains on, each as often as it does."""
        return self.rows * self.epochs

    def require_prompts(self, prompts: int) -> None:
        """Raise if an epoch of so many prompts on each rank has no rollout."""
        if prompts < self.prompts:
            raise ConfigError(
                "batch_size",
                self.prompts,
                f"makes rollouts of {counted(self.prompts, 'prompt')} per rank, and the data has {prompts}",
                "Lower it, or use more data",
            )


def rollout_sizes(asked: Asked) -> RolloutSizes:
    """The sizes that a checked config asks for."""
    return RolloutSizes(
        asked["batch_size"],
        asked["grpo_samples"],
        asked["ppo_epochs"],
        asked["max_generated_tokens"],
        asked["ppo_batch_size"],
    )


def stop_tokens(asked: Asked, tokenizer: Any) -> list[int]:
    """The tokens that end a response."""
    given = asked["stop_token_ids"] or getattr(tokenizer, "stop_tokens", None)
    return list(given or [tokenizer.eos_id])


@dataclass(frozen=True)
class Phases:
    """The phases of a rollout, and what they were made for."""

    generation: Phase[Any, Any]
    generator: Generation
    scoring: Phase[Any, Any]
    padding_id: int
    sizes: RolloutSizes
    longest: int
    """Tokens of the longest prompt."""
    values: bool = False
    """Whether rows have values."""

    @property
    def longest_row(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.longest + self.sizes.max_new


def build_phases(
    asked: Asked,
    environment: Environment,
    step: TrainStep,
    policy: nn.Module,
    scorers: Scorers,
    tokenizer: Any,
    sizes: RolloutSizes,
    longest: int,
) -> Phases:
    """The phases of a run, which have no size yet.

    Args:
        asked: what was asked for.
        environment: the environment.
        step: that of the run.
        policy: the model that generates.
        scorers: what scores rows.
        tokenizer: the tokenizer.
        sizes: those of a rollout.
        longest: tokens of the longest prompt.

    Raises:
        ConfigError: the longest prompt leaves no room for a response.
    """
    lengths = [getattr(model, "max_seq_len", None) for model in (policy, *step.objective.frozen)]
    most = min((length for length in lengths if length is not None), default=None)
    if most is not None and longest + sizes.max_new > most:
        raise ConfigError(
            "max_generated_tokens",
            sizes.max_new,
            f"is too much: the longest prompt has {counted(longest, 'token')}, and the model takes {most}",
            f"Set it to {most - longest} or less, or leave out long prompts (dataset.filter_fn)"
            if most > longest
            else "Leave out prompts that long (dataset.filter_fn)",
        )
    generator = Generation(
        policy,
        tokenizer.pad_id,
        stop_tokens(asked, tokenizer),
        sizes.max_new,
        asked["temperature"],
        asked["top_k"],
        longest,
        environment.dtype,
        step.device,
    )
    scoring = Scoring(tokenizer.pad_id, step.device, *scorers)
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
        Phase(SCORING, step, scoring, shape=len),
        tokenizer.pad_id,
        sizes,
        longest,
        bool(scorers.values),
    )
