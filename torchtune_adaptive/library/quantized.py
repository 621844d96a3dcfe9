"""Linear layers whose frozen weights bitsandbytes has quantized, and the models that have them.

bitsandbytes needs a GPU: the layers of ``four_bit`` and ``eight_bit`` have the sizes of what it keeps and of
what it computes with, without values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class QuantizedLinear(nn.Module, ABC):
    """A linear layer whose frozen weight has fewer bits."""

    weight: nn.Parameter

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.shape = like.weight.shape
        self.out_features, self.in_features = self.shape
        self.bias = like.bias

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self.register_buffer(name, tensor, persistent=False)

    @abstractmethod
    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in a type that can be computed with."""


def quantize(model: Any, make: Callable[[nn.Linear], QuantizedLinear]) -> None:
    """Replace all linear layers of a model but the head, as transformers does when it loads it."""
    head = model.get_output_embeddings()
    for name, module in [*model.named_modules()]:
        if type(module) is nn.Linear and module is not head:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, make(module).requires_grad_(False))


def prepare(model: Any) -> None:
    """Let what is not quantized have 32 bits, as PEFT's ``prepare_model_for_kbit_training`` does."""
    quantized = quantized_weights(model)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter not in quantized:
            parameter.data = parameter.data.float()


def quantized_weights(model: nn.Module) -> set[nn.Parameter]:
    """The weights of all layers that are quantized."""
    return {module.weight for module in model.modules() if isinstance(module, QuantizedLinear)}
