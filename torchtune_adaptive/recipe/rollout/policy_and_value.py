"""Two models that are trained together: the policy, and the value model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

POLICY, VALUE = "policy", "value"
"""The names of the two, with which those of their weights begin."""


class PolicyAndValue(nn.Module):
    """Both models as one: for the step, its snapshot, the optimizer and the checkpoint.

    On several ranks each is sharded by itself.
    """

    def __init__(self, policy: nn.Module, value: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.value = value

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(tokens), self.value(tokens)


def joined(weights: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The weights of both models, by the names that they have together."""
    return {f"{model}.{name}": w for model, some in weights.items() for name, w in some.items()}


def of_model(model: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of one of the two, by the names that they have in it."""
    prefix = f"{model}."
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
