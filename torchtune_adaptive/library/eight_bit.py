"""Linear layers whose weights have 8 bits, with the memory of those that bitsandbytes makes of a model.

This is LLM.int8(): inputs are quantized for each product. Columns that have an input of a magnitude of 6
or more (*outliers*) are multiplied in 16 bits. Which these are depends on values, and none are here: they
take a copy of these columns, and for a moment one of the result. Checked against bitsandbytes 0.50.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchtune_adaptive.library.private import int_mm
from torchtune_adaptive.library.quantized import QuantizedLinear
from torchtune_adaptive.planner import fake_device


class EightBitLinear(QuantizedLinear):
    """A linear layer whose frozen weight has 8 bits, with a scale for each output."""

    scales: torch.Tensor

    def __init__(self, like: nn.Linear) -> None:
        super().__init__(like)
        device = like.weight.device
        codes = torch.empty(self.shape, dtype=torch.int8, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self._keep("scales", torch.empty(self.out_features, device=device))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            self.bias.data = self.bias.data.to(inputs.dtype)  # for good, as bitsandbytes does
        found: torch.Tensor = _IntegerProduct.apply(inputs, self.weight, self.bias, self)
        return found

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.to(dtype, copy=True).mul_(self.scales.unsqueeze(1) * (1 / 127))


class _IntegerProduct(torch.autograd.Function):
    """The product of quantized inputs and a quantized weight; backward has the whole weight."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: EightBitLinear,
    ) -> torch.Tensor:
        ctx.layer, ctx.shape, ctx.dtype = layer, inputs.shape, inputs.dtype
        flat = inputs.reshape(-1, layer.in_features)
        if ctx.needs_input_grad[0]:
            ctx.inputs = flat  # bitsandbytes keeps them, and does not use them
        codes, scales = _quantized(flat.to(torch.float16))
        sums = int_mm(codes, weight.t())
        found = torch.empty_like(sums, dtype=torch.float16)
        fake_device.ran("dequantize", [sums, scales, layer.scales], [found])
        if bias is not None and bias.dtype != found.dtype:  # else it is added in that kernel
            found.add_(bias)
        return found.to(inputs.dtype).view(*inputs.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        weight = ctx.layer.dequantized(ctx.dtype)
        return torch.matmul(grad.to(ctx.dtype), weight).view(ctx.shape), None, None, None


def _quantized(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs in 8 bits, and the scale of each row."""
    scales = inputs.new_empty(len(inputs), dtype=torch.float32)
    codes = torch.empty_like(inputs, dtype=torch.int8)
    outliers = inputs.abs() >= 6.0
    outliers.any()
    fake_device.ran("quantize", [inputs], [codes, scales])
    return codes, scales
