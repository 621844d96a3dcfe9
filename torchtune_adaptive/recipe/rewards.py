"""Rewards of responses: the user's functions, called and checked, and a few of our own.

A reward function takes ``(completion_ids, completions, answers)``: the tokens of responses, padded on the
right, their texts, and the answers of their prompts. It gives a number for each response or, as in
torchtune's main branch, an object with ``total_reward`` and ``successes``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.nn.utils.rnn import pad_sequence

from torchtune_adaptive.common import UsageError, counted
from torchtune_adaptive.recipe.components import make
from torchtune_adaptive.recipe.registry import component
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.upstream import component_path

RewardFunction = Callable[[torch.Tensor, list[str], list[Any]], Any]


@dataclass(frozen=True)
class RewardOutput:
    """What a reward function gives that has more to say than a number; a success is 0 or 1."""

    total_reward: torch.Tensor
    successes: torch.Tensor


@dataclass(frozen=True)
class Rewarded:
    """The rewards of rows: sums over reward functions, and those of each function."""

    rewards: torch.Tensor
    successes: torch.Tensor
    each: dict[str, torch.Tensor]


class BadReward(UsageError):
    """A reward function has not given a number for each response."""

    everywhere = False
    repeats = False  # other responses may have one


class Rewards:
    """The reward functions of a config.

    Args:
        asked: what was asked for, with its ``reward_functions``.
        tokenizer: the tokenizer, which makes texts of responses.
        stop_tokens: the tokens that end a response, and are not in its text.
        entering: called with the name of each function, before it is.
    """

    def __init__(
        self,
        asked: Asked,
        tokenizer: Any,
        stop_tokens: Sequence[int],
        entering: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_tokens = frozenset(stop_tokens)
        self._entering = entering
        blocks = asked["reward_functions"] or DEFAULT
        self.functions = dict(_function(block, number) for number, block in enumerate(blocks))

    def of(self, responses: Sequence[torch.Tensor], answers: Sequence[Any]) -> Rewarded:
        """The rewards of responses on the host, on this rank."""
        tokens = pad_sequence(
            list(responses), batch_first=True, padding_value=self._tokenizer.pad_id
        )
        texts = [self._text(response) for response in responses]
        each, successes = {}, torch.zeros(len(responses))
        for name, function in self.functions.items():
            self._entering(name)
            given = function(tokens.clone(), list(texts), list(answers))
            each[name] = _numbers(name, getattr(given, "total_reward", given), len(responses))
            if (found := getattr(given, "successes", None)) is not None:
                successes += _numbers(name, found, len(responses))
        return Rewarded(torch.stack([*each.values()]).sum(0), successes, each)

    def _text(self, response: torch.Tensor) -> str:
        tokens = [token for token in response.tolist() if token not in self._stop_tokens]
        return str(self._tokenizer.decode(tokens))


def _function(block: Any, number: int) -> tuple[str, RewardFunction]:
    """A reward function and its name: a function by its path, or what a block makes."""
    path = block._component_ if OmegaConf.is_config(block) else block
    found = component(component_path(path))
    name = path.rpartition(".")[2]
    if not OmegaConf.is_config(block):
        return name, found
    if inspect.isclass(found):
        return name, make(block, f"reward_functions[{number}]")
    arguments = {key: value for key, value in block.items() if key != "_component_"}
    return name, partial(found, **arguments)


def _numbers(name: str, given: Any, rows: int) -> torch.Tensor:
    try:
        numbers = torch.as_tensor(given, dtype=torch.float32, device="cpu").flatten()
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadReward(
            f"reward_functions: {name} gave {type(given).__name__}, not numbers. Return one for each "
            "response."
        ) from error
    if len(numbers) != rows:
        raise BadReward(
            f"reward_functions: {name} gave {counted(len(numbers), 'number')} for "
            f"{counted(rows, 'response')}. Return one for each."
        )
    if not bool(numbers.isfinite().all()):
        bad = int((~numbers.isfinite()).nonzero()[0])
        raise BadReward(
            f"reward_functions: {name} gave {float(numbers[bad])} for response {bad}, and advantages need "
            "numbers. Return a finite one."
        )
    return numbers


# --- rewards for answers that can be checked ------------------------------------------------------


def inside_of(tag: str, text: str) -> str | None:
    """What stands in the first pair of tags; None where there is none."""
    found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return found[1].strip() if found else None


def is_same(answer: str, attempt: str) -> bool:
    """Whether two answers are the same text, or the same number."""
    plain = [re.sub(r"[,$\s]", "", text) for text in (answer, attempt)]
    try:
        one, other = (Fraction(text) for text in plain)
    except (ValueError, ZeroDivisionError):
        return bool(plain[0]) and plain[0] == plain[1]
    return one == other


def thought(_: torch.Tensor, completions: list[str], answers: list[str]) -> RewardOutput:
    """1 where something is thought; the prompt has opened the tag."""
    rewards = torch.tensor([float(bool(inside_of("think", f"<think>{c}"))) for c in completions])
    return RewardOutput(rewards, rewards)


def answered(_: torch.Tensor, completions: list[str], answers: list[str]) -> RewardOutput:
    """100 for the right answer, 50 where it is part of the answer, 1 for any."""
    rewards = []
    for completion, answer in zip(completions, answers, strict=True):
        attempt = inside_of("answer", completion) or ""
        partly = 50.0 if answer in attempt else float(bool(attempt))
        rewards.append(100.0 if is_same(answer, attempt) else partly)
    found = torch.tensor(rewards)
    return RewardOutput(found, (found == 100).float())


DEFAULT = tuple(f"{__name__}.{function.__name__}" for function in (thought, answered))
"""The rewards of a config that names none, as of torchtune's recipe."""


@dataclass(frozen=True)
class FormattedMathCorrectnessReward:
    """For the right answer in its tags, and half of it where it stands anywhere."""

    answer_tag: str
    positive_reward: float
    negative_reward: float = 0.0

    def __call__(self, _: torch.Tensor, completions: list[str], answers: list[str]) -> RewardOutput:
        def reward(completion: str, answer: str) -> float:
            if is_same(answer, inside_of(self.answer_tag, completion) or ""):
                return self.positive_reward
            return self.positive_reward / 2 if answer in completion else self.negative_reward

        found = torch.tensor([reward(*pair) for pair in zip(completions, answers, strict=True)])
        return RewardOutput(found, (found == self.positive_reward).float())


@dataclass(frozen=True)
class ThinkingAnswerFormattingReward:
    """Rewards one pair of each tag in their order, and once more where each stands on lines of its own."""

    think_tag: str
    answer_tag: str
    positive_reward: float
    negative_reward: float = 0.0

    def __call__(self, _: torch.Tensor, completions: list[str], answers: list[str]) -> RewardOutput:
        tags = [
            f"<{slash}{tag}>" for tag in (self.think_tag, self.answer_tag) for slash in ("", "/")
        ]
        on_lines = "\n.*?\n".join(tags[:2]) + "\n" + "\n.*?\n".join(tags[2:]) + "\n"

        def reward(completion: str) -> float:
            at = [completion.find(tag) for tag in tags]
            once = all(completion.count(tag) == 1 for tag in tags)
            strictly = re.fullmatch(on_lines, completion, re.DOTALL)
            kept = (once and at == sorted(at), strictly)
            return sum(self.positive_reward if one else self.negative_reward for one in kept)

        found = torch.tensor([reward(completion) for completion in completions])
        return RewardOutput(found, (found >= self.positive_reward).float())
