"""Scoring: what models say about whole rows, one number for each position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torchtune_adaptive.recipe.rollout.rows import Row

OfTokens = Callable[[torch.Tensor], torch.Tensor]
"""From the tokens of padded rows to a number for each position."""


@dataclass
class Scoring:
    """Gives numbers for the responses of rows; of a micro-batch, nothing stays on the device."""

    padding_id: int
    device: torch.device
    log_probs: Mapping[str, OfTokens]
    """By name, what gives a number for each token of the response, such as ``LogProbs`` of a model."""
    values: Mapping[str, OfTokens] = field(default_factory=dict)
    """By name, what gives a number before each token of the response, and one after the last."""

    def __call__(self, rows: Sequence[Row]) -> list[dict[str, torch.Tensor]]:
        """The numbers of each row by name, on the host."""
        raise NotImplementedError
