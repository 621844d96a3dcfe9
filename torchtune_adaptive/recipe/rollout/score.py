"""Scoring: what models say about whole rows, in one number for each position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from torchtune_adaptive.recipe.rollout.rows import Row, collate, on_host

OfTokens = Callable[[torch.Tensor], torch.Tensor]
"""A function of the tokens of padded rows, which gives a number for each position."""


def values_of(model: nn.Module) -> OfTokens:
    """The values of all positions, by a model with one output."""
    return lambda tokens: model(tokens)[..., 0]


class Scorers(NamedTuple):
    """What scores rows, by the names in ``Row``; see ``Scoring``."""

    log_probs: Mapping[str, OfTokens]
    values: Mapping[str, OfTokens]


@dataclass
class Scoring:
    """Scores the responses of rows. Of a micro-batch, nothing stays on the device.

    Evaluation mode, and no gradients, are the caller's part.
    """

    padding_id: int
    device: torch.device
    log_probs: Mapping[str, OfTokens]
    """By name, what gives a number for each token of a response: ``LogProbs`` of models."""
    values: Mapping[str, OfTokens] = field(default_factory=dict)
    """By name, what gives a number before each token of a response, and after the last: ``values_of`` models.
    The last of a reward model's is the reward."""

    def __call__(self, rows: Sequence[Row]) -> list[dict[str, torch.Tensor]]:
        """The numbers of each row by name, on the host, in float32."""
        batch = collate(rows, self.padding_id)
        tokens = batch["tokens"].to(self.device)
        models = {**self.log_probs, **self.values}
        # One model after the other, and copied at once.
        scores = on_host(torch.stack([model(tokens).float() for model in models.values()]))
        first = [len(row.prompt) - 1 for row in rows]
        end = (batch["response"].sum(1) + torch.tensor(first)).tolist()
        return [
            {
                name: each[at, first[at] : end[at] + (name in self.values)]
                for name, each in zip(models, scores, strict=True)
            }
            for at in range(len(rows))
        ]
