"""Knowledge distillation: adapters of a student are trained to predict as a larger teacher does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.core import Batch, Forward, NextTokenPrediction, Summed
from torchtune_adaptive.recipe.kinds.recipe_kind import LoRA
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.optimizer import build_loss
from torchtune_adaptive.recipe.upstream import labels_are_shifted


class Distillation(NextTokenPrediction):
    """Predicts each token from those before it, and all tokens with a teacher's probabilities.

    Args:
        loss_fn: the mean loss of all tokens whose label is not ``loss_fn.ignore_index``.
        kd_loss_fn: the mean divergence of the student's predictions from the teacher's, over the same tokens.
        teacher: the model that is learned from; it gives its output in the chunks that the student does.
        ratio: the part of the divergence in the whole loss.
        shifted: True where the label at a position is the token that comes next, not the token itself.
    """

    metrics: Sequence[str] = ("class_loss", "kd_loss")

    def __init__(
        self,
        loss_fn: nn.Module,
        kd_loss_fn: nn.Module,
        teacher: nn.Module,
        ratio: float,
        shifted: bool = False,
    ) -> None:
        super().__init__(loss_fn, shifted)
        self.kd_loss_fn = kd_loss_fn
        self.frozen: Sequence[nn.Module] = (teacher,)
        self._ratio = ratio

    def summed_loss(self, forward: Forward, batch: Batch, weight: int) -> Summed:
        inputs, labels = self._inputs(batch), self._labels(batch, weight)
        # First, while nothing is kept for backward. Also without a token that counts: other ranks take part
        # in its collectives.
        with torch.no_grad():
            taught = self.frozen[0](**inputs)
        logits = forward(**inputs)
        if not isinstance(logits, list):
            logits, labels = logits.flatten(0, 1), labels.flatten()
            taught = taught.flatten(0, 1)
        kd_loss = self.kd_loss_fn(logits, taught, labels)
        del taught
        class_loss = self.loss_fn(logits, labels)
        loss = (1 - self._ratio) * class_loss + self._ratio * kd_loss
        sums = {"class_loss": class_loss.detach() * weight, "kd_loss": kd_loss.detach() * weight}
        return Summed(loss * weight, metrics=sums)


class KD(LoRA):
    """Trains adapters of a student, with a teacher in memory."""

    def objective(self, model: nn.Module, frozen: Sequence[nn.Module]) -> Distillation:
        [teacher] = frozen
        loss_fn = build_loss(self.asked, self.environment, model)
        kd_loss_fn = build_loss(self.asked, self.environment, teacher, "kd_loss")
        _require_same_output(self.asked, model, teacher)
        _require_same_chunks(self.asked, loss_fn, kd_loss_fn)
        ratio = self.asked["kd_ratio"]
        return Distillation(loss_fn, kd_loss_fn, teacher, ratio, labels_are_shifted())


def _require_same_output(asked: Asked, student: nn.Module, teacher: nn.Module) -> None:
    """Predictions of both models must be over the same tokens."""
    theirs, ours = _vocabulary(teacher), _vocabulary(student)
    if theirs != ours:
        raise ConfigError(
            "teacher_model",
            asked.cfg.teacher_model._component_,
            f"predicts {theirs} tokens, but model predicts {ours}",
            "Choose a teacher that has the vocabulary of the student",
        )
    if getattr(student, "skip_output_layer", False):  # torchtune's main branch
        raise ConfigError(
            "loss",
            asked.cfg.loss._component_,
            "takes hidden states, but kd_loss compares logits",
            "Use torchtune.modules.loss.CEWithChunkedOutputLoss",
        )


def _vocabulary(model: nn.Module) -> int | None:
    return getattr(getattr(model, "tok_embeddings", None), "num_embeddings", None)


def _require_same_chunks(asked: Asked, loss_fn: nn.Module, kd_loss_fn: nn.Module) -> None:
    """Both losses are given the same logits."""
    ours, theirs = (getattr(each, "num_output_chunks", None) for each in (loss_fn, kd_loss_fn))
    if ours != theirs:
        raise ConfigError(
            "kd_loss",
            asked.cfg.kd_loss._component_,
            f"takes {_chunks(theirs)}, but loss takes {_chunks(ours)}",
            "Give both the same num_output_chunks, or take a loss without chunks for both",
        )


def _chunks(number: int | None) -> str:
    return "all logits at once" if number is None else f"logits in {number} chunks"
