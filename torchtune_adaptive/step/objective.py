"""What training minimizes: how a micro-batch becomes a loss.

Losses are sums, and each comes with its *weight*: the number of terms that it is a sum of. A step divides
once, by the weight of all micro-batches of all ranks, so how its rows are split never matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, Any]

Forward = Callable[..., Any]
"""The forward pass of the model that is trained, with activation offloading where that is on."""


class Objective(Protocol):
    """What ``TrainStep`` minimizes; every kind of recipe has its own."""

    ignored: int
    """The label of what is not trained on, such as padding."""

    frozen: Sequence[nn.Module]
    """Models that the loss needs besides the trained one, such as a teacher or a reference."""

    def rows(self, batch: Batch) -> int:
        """The samples in a micro-batch."""

    def weight(self, batch: Batch) -> int:
        """The number of terms in the loss of a micro-batch that is still on the host: counting there never
        waits for the device."""

    def summed_loss(self, forward: Forward, batch: Batch, weight: int) -> torch.Tensor:
        """The loss of a micro-batch on the device, summed over its terms; 0 if there are none."""


class NextTokenPrediction:
    """Predicts each token from those before it, as supervised finetuning does.

    A token counts if it is predicted and its label is not masked. The first of a row is not predicted, so it
    does not count, whatever its label. torchtune's recipes count it where its label is not masked (text
    completion, ``train_on_input: True``), although their loss is a mean without it. So micro-batches get
    weights that are slightly off there: a step depends on how its rows are split, by 4e-4 of the gradient's
    norm on usual rows and by 2 % on very short ones. Where prompts are masked, both count alike.

    Packed rows are shifted as a whole, as in torchtune: the first token of a document inside a pack is
    predicted, and so it counts.

    Args:
        loss_fn: the mean loss of all tokens whose label is not ``loss_fn.ignore_index``.
    """

    frozen: Sequence[nn.Module] = ()

    def __init__(self, loss_fn: nn.Module) -> None:
        self.loss_fn = loss_fn
        self.ignored: int = loss_fn.ignore_index  # type: ignore[assignment]

    def rows(self, batch: Batch) -> int:
        return len(batch["tokens"])

    def weight(self, batch: Batch) -> int:
        return int((batch["labels"][..., 1:] != self.ignored).sum())

    def summed_loss(self, forward: Forward, batch: Batch, weight: int) -> torch.Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = forward(**inputs)
        if weight == 0:  # the mean over no tokens is NaN, and would spoil the whole step
            chunks = logits if isinstance(logits, list) else [logits]
            return torch.stack([chunk.sum() for chunk in chunks]).sum() * 0.0
        # Position by position, the token that comes next; the last position has none.
        labels = F.pad(batch["labels"][..., 1:], (0, 1), value=self.ignored)
        if not isinstance(logits, list):
            logits, labels = logits.reshape(-1, logits.size(-1)), labels.reshape(-1)
        loss: torch.Tensor = self.loss_fn(logits, labels)
        return loss * weight
