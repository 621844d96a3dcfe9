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
    """What a rollout is made of. It is part of the training, and nothing changes it, not even other ranks."""

    prompts: int
    """Prompts on each of the ranks that the run began with."""
    samples: int
    """Responses to each prompt."""
    epochs: int
    """Times that its rows are trained on."""
    max_new: int
    """Tokens of the longest response."""
    mini_batch: int | None = None
    """Rows of a step on each of those ranks; None for all of them."""
    began: int = 1
    """The number of those ranks."""
    ranks: int = 1
    """The number of ranks now, to which prompts are dealt out one by one; some may have one less."""

    @property
    def all_prompts(self) -> int:
        return self.prompts * self.began

    @property
    def all_rows(self) -> int:
        return self.all_prompts * self.samples

    @property
    def all_step_rows(self) -> int:
        """Rows of a step."""
        return self.mini_batch * self.began if self.mini_batch else self.all_rows

    @property
    def rows(self) -> int:
        """The most rows that a rank has now."""
        return -(-self.all_prompts // self.ranks) * self.samples

    @property
    def step_rows(self) -> int:
        """Rows of a step on each rank, if it had equal shares."""
        return -(-self.all_step_rows // self.ranks)

    def require_prompts(self, prompts: int) -> None:
        """Raise if an epoch of so many prompts has no rollout, or a rank no prompt."""
        if prompts < self.all_prompts:
            raise ConfigError(
                "batch_size",
                self.prompts,
                f"makes rollouts of {counted(self.all_prompts, 'prompt')}, and the data has {prompts}",
                "Lower it, or use more data",
            )
        if self.all_prompts < self.ranks:
            raise ConfigError(
                "batch_size",
                self.prompts,
                f"makes rollouts of {counted(self.all_prompts, 'prompt')}, and not one for each of "
                f"{counted(self.ranks, 'rank')}",
                "Use fewer ranks",
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
