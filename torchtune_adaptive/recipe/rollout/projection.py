"""The last projection of a model, which makes logits: by far the largest tensors of a rollout.

What is wanted of them is small: those of the last token, or one number of each position. So the projection is
replaced by one that gives just this, and whole logits never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchtune_adaptive.recipe.setup.model_switches import head_of

_CHUNKS = 8
"""As many as torchtune's losses take a model's output in."""

Project = Callable[..., torch.Tensor]
"""From hidden states, and the weight where it is another layer's, to logits."""


@contextmanager
def _replaced(model: nn.Module, projection: Callable[..., torch.Tensor]) -> Iterator[None]:
    """A context in which a model ends with ``projection``, which gets the usual one as first argument.

    It takes the place of ``forward`` alone, so the hooks stay: FSDP gathers weights once, as always.
    """
    head = head_of(model)
    usual: Project = head.forward
    own = vars(head).get("forward")
    head.forward = partial(projection, usual)
    try:
        yield
    finally:
        if own is None:
            del head.forward
        else:
            head.forward = own


def only_last(model: nn.Module) -> Any:
    """A context in which a model gives the logits of the last position only."""
    return _replaced(model, lambda project, hidden, *weight: project(hidden[:, -1:], *weight))


class LogProbs:
    """The log-probability that a model gives to the token that comes next, at each position.

    Logits are computed in chunks of positions, and again in backward.

    Args:
        model: the model.
        temperature: what logits are divided by.
    """

    def __init__(self, model: nn.Module, temperature: float = 1.0) -> None:
        self._model = model
        self._temperature = temperature

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Those of padded rows, in float32; at the last position there is nothing to predict, so 0... """
        with self.replacing_logits(tokens):
            return self._model(tokens)

    @contextmanager
    def replacing_logits(self, tokens: torch.Tensor) -> Iterator[None]:
        """A context in which the model gives log-probabilities of its input ``tokens``, in place of logits."""
        following = F.pad(tokens[:, 1:], (0, 1))
        with _replaced(self._model, partial(self._in_chunks, following)):
            yield

    def _in_chunks(
        self, following: torch.Tensor, project: Project, hidden: torch.Tensor, *weight: torch.Tensor
    ) -> torch.Tensor:
        raise NotImplementedError
