"""Quantization-aware training of all weights: layers compute as if they were quantized."""

from __future__ import annotations

from torch import nn

from torchtune_adaptive.recipe.kinds.full import Full
from torchtune_adaptive.recipe.kinds.quantization import build_quantizer, quantize_from, quantized


class QAT(Full):
    """Trains every weight for being quantized later."""

    def prepare(self, model: nn.Module) -> nn.Module:
        quantizer = build_quantizer(self.asked, self.environment.dtype)
        return quantized(self.asked, quantizer.prepare(model))

    def before_step(self, model: nn.Module, number: int) -> None:
        quantize_from(self.asked, model, number)


TheKind = QAT
