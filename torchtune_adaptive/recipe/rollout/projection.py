"""The last projection of a model, which makes logits: by far the largest tensors of a rollout.

Little is wanted of them: those of the last token, or one number for each position. So the projection is
replaced by one that gives just that, and whole logits never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchtune_adaptive.recipe.setup.model_switches import head_of

_CHUNKS = 8
"""The parts in which positions are projected: as many as in torchtune's losses."""

Project = Callable[..., torch.Tensor]
"""A projection: from hidden states, and the weight where it is another layer's, to logits."""


@contextmanager
def _replaced(model: nn.Module, projection: Callable[..., torch.Tensor]) -> Iterator[None]:
    """A context in which a model ends with ``projection``, whose first argument is the usual one.

    It takes the place of the module's ``forward`` only. So hooks stay, and FSDP gathers what it always does.
    """
    head = head_of(model)
    assert head is not None, f"{type(model).__name__} has no last projection"
    usual: Project = head.forward
    own = vars(head).get("forward")  # where something else has replaced it already
    head.forward = partial(projection, usual)
    try:
        yield
    finally:
        if own is None:
            del head.forward
        else:
            head.forward = own


def last_logits_only(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which a model gives logits of the last position only."""

    def of_last(project: Project, hidden: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        return project(hidden[:, -1:], *weight)

    return _replaced(model, of_last)


class LogProbs:
    """The log-probabilities that a model gives to the tokens that come next.

    Logits are computed in chunks, and in backward again, so those of one chunk exist at a time.

    Args:
        temperature: the number that logits are divided by.
    """

    def __init__(self, model: nn.Module, temperature: float = 1.0) -> None:
        self._model = model
        self._temperature = temperature

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """A number for each position, in float32. The last has no next token, and its number no meaning."""
        with self.replacing_logits(tokens):
            return self._model(tokens)

    def replacing_logits(self, tokens: torch.Tensor) -> AbstractContextManager[None]:
        """A context in which the model gives the log-probabilities of its input in the place of logits."""
        following = F.pad(tokens[:, 1:], (0, 1))
        return _replaced(self._model, partial(self._in_chunks, following))

    def _in_chunks(
        self, following: torch.Tensor, project: Project, hidden: torch.Tensor, *weight: torch.Tensor
    ) -> torch.Tensor:
        def of_chunk(hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
            logits = project(hidden, *weight).float().flatten(0, 1)
            if self._temperature != 1.0:
                logits = logits / self._temperature
            log_probs = -F.cross_entropy(logits, following.flatten(), reduction="none")
            return log_probs.view_as(following)

        run = partial(checkpoint, of_chunk, use_reentrant=False)
        chunks = zip(hidden.chunk(_CHUNKS, 1), following.chunk(_CHUNKS, 1), strict=True)
        again = torch.is_grad_enabled()
        return torch.cat([run(*chunk) if again else of_chunk(*chunk) for chunk in chunks], 1)
