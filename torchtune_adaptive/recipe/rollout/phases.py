"""The phases of a rollout besides training: what generates rows, and what scores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtune_adaptive.common import ConfigError, counted
from torchtune_adaptive.core import Phase
from torchtune_adaptive.recipe.rollout.generate import Generation
from torchtune_adaptive.recipe.settings.asked import Asked


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
    sizes: RolloutSizes
    longest: int
    """Tokens of the longest prompt."""
    values: bool = False
    """Whether rows have values."""

    @property
    def longest_row(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.longest + self.sizes.max_new
