"""The objective of training: how a micro-batch becomes a loss.

Losses are sums, and each comes with its *weight*: the number of terms that it is a sum of. A step divides
once, by the weight of all micro-batches of all ranks, so how its rows are split never matters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from torchtune_adaptive.core.step.recompute import RecomputedChunks

Batch = Any
"""A micro-batch as a collate function makes it; the recipes' are dictionaries of tensors."""


@dataclass(frozen=True)
class Weightless:
    """A micro-batch that counts for nothing: a rank that has no more rows launches with it what others do."""

    batch: Batch


Forward = Callable[..., Any]
"""The forward pass of the model that is trained, with activation offloading where that is on."""


class Summed(NamedTuple):
    """A summed loss, and what else the forward pass tells."""

    loss: torch.Tensor
    weight: int | None = None
    """The number of its terms, where it is not known before."""
    metrics: Mapping[str, torch.Tensor] | None = None
    """Detached sums of what else is logged, over the same terms, on the device."""


class Objective(Protocol):
    """The loss that ``TrainStep`` minimizes; every kind of recipe has its own."""

    unit: str
    """Things that ``weight`` counts: ``tokens``, or something else."""
    ignored: int
    """The label of what is not trained on, such as padding."""
    frozen: Sequence[nn.Module]
    """Models that the loss needs besides the trained one, such as a teacher or a reference."""
    metrics: Sequence[str]
    """The names of what ``summed_loss`` gives besides the loss."""

    def rows(self, batch: Batch) -> int:
        """The samples in a micro-batch."""

    def weight(self, batch: Batch) -> int:
        """The number of terms in the loss of a micro-batch that is still on the host: counting there never
        waits for the device. Where ``summed_loss`` tells it, this is not used."""

    def summed_loss(self, forward: Forward, batch: Batch, weight: int) -> torch.Tensor | Summed:
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
        shifted: whether the label at a position is the token that comes next already, or the token itself.
    """

    unit = "tokens"
    frozen: Sequence[nn.Module] = ()
    metrics: Sequence[str] = ()

    def __init__(self, loss_fn: nn.Module, shifted: bool = False) -> None:
        self.loss_fn: Any = loss_fn
        self._shifted = shifted
        self.ignored: int = loss_fn.ignore_index  # type: ignore[assignment]
        self.recomputed: RecomputedChunks | None = None
        """Switch of a loss in chunks: while it is on, backward computes their logits again."""

    @property
    def output_chunks(self) -> int:
        """The number of chunks in which the loss takes the model's output."""
        return int(getattr(self.loss_fn, "num_output_chunks", 1))

    def rows(self, batch: Batch) -> int:
        return len(batch["tokens"])

    def weight(self, batch: Batch) -> int:
        return int((self._targets(batch) != self.ignored).sum())

    def summed_loss(self, forward: Forward, batch: Batch, weight: int) -> torch.Tensor | Summed:
        inputs, labels = self._inputs(batch), self._targets(batch)
        if self.recomputed is not None and self.recomputed.on:
            with self.recomputed.replacing_logits(labels.chunk(self.output_chunks, dim=1)):
                summed: torch.Tensor = sum(forward(**inputs))  # type: ignore[assignment]
            mean = summed / (labels != self.ignored).sum() if weight else summed * 0.0
            return mean * weight  # the mean and the sum again: the arithmetic of the lines below
        logits = forward(**inputs)
        labels = self._labels(batch, weight)
        if not isinstance(logits, list):
            logits, labels = logits.reshape(-1, logits.size(-1)), labels.reshape(-1)
        loss: torch.Tensor = self.loss_fn(logits, labels)
        return loss * weight

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name != "labels"}

    def _labels(self, batch: Batch, weight: int) -> torch.Tensor:
        """The labels that the loss compares predictions to."""
        labels = self._targets(batch)
        if weight == 0:
            # The mean over no tokens is NaN, and would spoil the whole step; and every parameter must have a
            # gradient, or FSDP would reduce others than on other ranks. So one token counts, for nothing.
            labels = labels.clone()
            labels[..., 0] = 0
        return labels

    def _targets(self, batch: Batch) -> torch.Tensor:
        """The token that comes next, at each position; the last position has none."""
        labels: torch.Tensor = batch["labels"]
        if self._shifted:
            return labels
        return F.pad(labels[..., 1:], (0, 1), value=self.ignored)
