"""Quantization-aware training of adapters: the layers that have them compute as if they were quantized."""

from __future__ import annotations

from torch import nn
from torchtune.modules.peft import DoRALinear, LoRALinear
from torchtune.training.quantization import swap_lora_linear_with_qat

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.recipe.kinds.lora import LoRA
from torchtune_adaptive.recipe.kinds.quantization import build_quantizer, quantize_from, quantized
from torchtune_adaptive.recipe.private import has_quantized_base
from torchtune_adaptive.recipe.upstream import fake_quantization_for_lora


class QATLoRA(LoRA):
    """Trains adapters of a model that will be quantized later."""

    def prepare(self, model: nn.Module) -> nn.Module:
        self._require_plain_adapters(model)
        quantizer = build_quantizer(self.asked, self.environment.dtype)
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

    def before_step(self, model: nn.Module, number: int) -> None:
        quantize_from(self.asked, model, number)

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


TheKind = QATLoRA
