"""Steps on one rank, and the gradients that they should have."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.decoder import train_step
from tests.helpers.ranks import Alone


def step_of(model: nn.Module, optimizer: Any, **settings: Any) -> Any:
    return train_step(model, [optimizer], ranks=Alone(), **settings)


def plain_gradients(
    model: nn.Module, batches: list[dict[str, Any]]
) -> tuple[list[torch.Tensor], float]:
    """Mean loss over all tokens that count, and its gradients, the straightforward way."""
    losses, tokens = torch.zeros(()), 0
    for one in batches:
        inputs = {name: value for name, value in one.items() if name != "labels"}
        logits = torch.cat(model(**inputs), dim=1)[:, :-1]
        labels = one["labels"][:, 1:]
        losses = losses + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        tokens += int((labels != -100).sum())
    (losses / tokens).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients, float(losses.detach() / tokens)


class Kept(torch.optim.SGD):
    """Changes nothing and keeps the gradients that it was given."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = [p.grad.clone() for group in self.param_groups for p in group["params"]]
