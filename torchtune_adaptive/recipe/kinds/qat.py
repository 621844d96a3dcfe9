"""Quantisation-aware training of all weights: layers compute as if they were quantised."""

from __future__ import annotations

from torch import nn

from torchtune_adaptive.recipe.kinds.full import Full
from torchtune_adaptive.recipe.kinds.quantisation import build_quantizer, quantise_from, quantised


class QAT(Full):
    """Trains every weight for being quantised later."""

    def prepare(self, model: nn.Module) -> nn.Module:
        quantizer = build_quantizer(self.cfg, self.environment.dtype)
        return quantised(self.cfg, quantizer.prepare(model))

    def before_step(self, model: nn.Module, number: int) -> None:
        quantise_from(self.cfg, model, number)


TheKind = QAT
