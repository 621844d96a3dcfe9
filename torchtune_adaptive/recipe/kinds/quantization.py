"""What the recipes for quantization-aware training share: their quantizer, and when it begins."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchtune.training.quantization import get_quantizer_mode

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.recipe.components import make
from torchtune_adaptive.recipe.settings.asked import Asked


def build_quantizer(asked: Asked, dtype: torch.dtype) -> Any:
    """The quantizer of a config.

    Raises:
        ConfigError: it is none for training.
    """
    quantizer = make(asked.cfg.quantizer, "quantizer")
    if "qat" not in (get_quantizer_mode(quantizer) or ""):
        raise ConfigError(
            "quantizer",
            asked.cfg.quantizer._component_,
            "is not a quantizer for training",
            "Use torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer",
        )
    quantizer.precision = dtype
    return quantizer


def _fake_quantizers(model: nn.Module) -> list[nn.Module]:
    """They have no class in common in the versions of torchao, but these names."""
    names = ("activation_fake_quantizer", "weight_fake_quantizer")
    found = (getattr(module, name, None) for module in model.modules() for name in names)
    return [each for each in found if each is not None and hasattr(each, "enabled")]


def quantized(asked: Asked, model: nn.Module) -> nn.Module:
    """A model as its quantizer has prepared it, but without anything that outlives a step.

    Raises:
        ConfigError: no layer is quantized.
    """
    found = _fake_quantizers(model)
    if not found:
        raise ConfigError(
            "quantizer",
            asked.cfg.quantizer._component_,
            "quantizes no layer of the model",
            "Set quantizer.groupsize to a divisor of the sizes of its layers",
        )
    for each in found:
        if getattr(getattr(each, "config", None), "is_dynamic", False):
            each.register_forward_hook(_drop_scales, always_call=True)
    return model


def _drop_scales(module: nn.Module, *_: Any) -> None:
    """Drop what a pass has computed; torchao keeps it until the next one, also when memory runs out."""
    module.scale = module.zero_point = None  # type: ignore[assignment]


def quantize_from(asked: Asked, model: nn.Module, number: int) -> None:
    """Quantize or not, as step ``number`` should: not in the first ``fake_quant_after_n_steps``."""
    begins = number > asked["fake_quant_after_n_steps"]
    for each in _fake_quantizers(model):
        each.enabled = begins
