"""Quantization-aware training (QAT): layers compute as if they were quantized, which they will be later."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchtune.modules.peft import DoRALinear, LoRALinear
from torchtune.training.quantization import get_quantizer_mode, swap_lora_linear_with_qat

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.recipe.components import make
from torchtune_adaptive.recipe.kinds.recipe_kind import Full, LoRA, RecipeKind
from torchtune_adaptive.recipe.private import has_quantized_base
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.upstream import fake_quantization_for_lora


def _fake_quantizers(model: nn.Module) -> list[nn.Module]:
    """They have no class in common in the versions of torchao, but these names."""
    names = ("activation_fake_quantizer", "weight_fake_quantizer")
    found = (getattr(module, name, None) for module in model.modules() for name in names)
    return [each for each in found if each is not None and hasattr(each, "enabled")]


def quantized(asked: Asked, model: nn.Module) -> nn.Module:
    """A model as its quantizer has prepared it, but without anything that outlives a step; ``ConfigError`` if
    no layer is quantized."""
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


class _QuantizationAware(RecipeKind):
    """What both kinds have in common: a quantizer, and the step from which it takes effect."""

    def before_step(self, model: nn.Module, number: int) -> None:
        begins = number > self.asked["fake_quant_after_n_steps"]
        for each in _fake_quantizers(model):
            each.enabled = begins

    def quantizer(self) -> Any:
        """The quantizer of the config; ``ConfigError`` if it is none for training."""
        quantizer = make(self.asked.cfg.quantizer, "quantizer")
        if "qat" not in (get_quantizer_mode(quantizer) or ""):
            raise ConfigError(
                "quantizer",
                self.asked.cfg.quantizer._component_,
                "is not a quantizer for training",
                "Use torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer",
            )
        quantizer.precision = self.environment.dtype
        return quantizer


class QAT(_QuantizationAware, Full):
    """Trains every weight for being quantized later."""

    def prepare(self, model: nn.Module) -> nn.Module:
        return quantized(self.asked, self.quantizer().prepare(model))


class QATLoRA(_QuantizationAware, LoRA):
    """Trains adapters of a model that will be quantized later: the layers that have them compute so."""

    def prepare(self, model: nn.Module) -> nn.Module:
        self._require_plain_adapters(model)
        quantizer = self.quantizer()
        described = (
            quantizer.get_activation_fake_quantize_config(),
            quantizer.get_weight_fake_quantize_config(),
        )
        try:
            swap_lora_linear_with_qat(model, *map(fake_quantization_for_lora, described))
        except ValueError as error:  # a layer's size is no multiple of the group's
            raise ConfigError(
                "quantizer",
                self.asked.cfg.quantizer._component_,
                f"does not fit the model: {error}",
                "Set quantizer.groupsize to a divisor of the sizes of its layers",
            ) from error
        return quantized(self.asked, model)

    def _require_plain_adapters(self, model: nn.Module) -> None:
        for module in model.modules():
            quantized_base = isinstance(module, LoRALinear) and has_quantized_base(module)
            if isinstance(module, DoRALinear) or quantized_base:
                key = "model.quantize_base" if quantized_base else "model.use_dora"
                raise ConfigError(
                    key,
                    True,
                    "cannot be combined with quantization-aware training",
                    f"Set {key}=False",
                )
