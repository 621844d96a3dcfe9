"""Generation of responses: each row draws by itself, whatever rows are beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from torchtune_adaptive.recipe.rollout.rows import Row


class Response(NamedTuple):
    """The response to a prompt, on the host."""

    tokens: torch.Tensor
    """Up to the first stop token, which is included."""
    stopped: bool
    """Whether it ends with one."""


@dataclass
class Generation:
    """Generates the responses to prompts, with caches of keys and values that are gone afterward."""

    model: nn.Module
    padding_id: int
    stop_tokens: Sequence[int]
    max_new: int
    """Tokens of the longest response."""
    temperature: float
    top_k: int | None
    width: int
    """Tokens of the longest prompt. Prompts are padded to it, on the left: a constant one means constant
    shapes, so that a row's numbers do not depend on the rows beside it."""
    dtype: torch.dtype
    """That of the caches."""
    device: torch.device

    def alone(self, rows: Sequence[Row]) -> list[Response]:
        """The responses, on this rank only: it launches no collective, and ends when these rows have stopped."""
        raise NotImplementedError

    def together(self, rows: Sequence[Row]) -> list[Response]:
        """The same responses, where the model is sharded: each token is a forward pass on all ranks, and there
        are always as many."""
        raise NotImplementedError

    def trial(self, rows: Sequence[Row]) -> list[Response]:
        """Two tokens of each response: the first takes the prompts, the second is like every other, and the
        caches are as large as ever. No other token takes more memory."""
        raise NotImplementedError
