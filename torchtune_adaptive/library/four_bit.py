"""Linear layers whose weights have 4 bits, with the memory of those that bitsandbytes makes of a model.

Checked against bitsandbytes 0.50, PEFT 0.21 and TRL 1.16. With fewer than about 1,500 tokens in a micro-batch
bitsandbytes may multiply without the whole weight, which takes less than planned.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtune_adaptive.library.quantized import QuantizedLinear
from torchtune_adaptive.planner import fake_device

_BLOCK = 64
"""Weights that have a scale in common."""
_SCALES = 256
"""Scales that have a scale in common, where they are quantized as well (*double quantization*)."""
_CODES = 16
"""Numbers that 4 bits stand for: each layer has a table. The one for scales is shared, and left out."""


class FourBitLinear(QuantizedLinear):
    """A linear layer whose frozen weight has 4 bits.

    Args:
        like: the layer that it replaces.
        compute_in: the type in which it multiplies.
        double: whether the scales of the blocks have 8 bits instead of 32.
        storage: the type that the weight looks like. One for numbers is one that FSDP2 can shard.
    """

    scales: torch.Tensor
    mean_scale: torch.Tensor

    def __init__(
        self,
        like: nn.Linear,
        compute_in: torch.dtype,
        double: bool,
        storage: torch.dtype = torch.uint8,
    ) -> None:
        super().__init__(like)
        self.dtype, self.compute_in, self.nested = like.weight.dtype, compute_in, double
        device = like.weight.device
        count = -(-self.shape.numel() // (2 * storage.itemsize))
        codes = torch.empty(count, 1, dtype=storage, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        blocks = -(-self.shape.numel() // _BLOCK)
        scales = torch.empty(blocks, dtype=torch.uint8 if double else torch.float32, device=device)
        self._keep("scales", scales)
        self._keep("table", torch.empty(_CODES, device=device))
        if double:
            self._keep("scales_of_scales", torch.empty(-(-blocks // _SCALES), device=device))
            self._keep("mean_scale", torch.empty((), device=device))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(self.compute_in)
        found: torch.Tensor = _Product.apply(inputs.to(self.compute_in), self.weight, bias, self)
        return found.to(inputs.dtype)

    def full_scales(self) -> torch.Tensor:
        """The scales of the blocks in 32 bits."""
        return self.scales.to(torch.float32)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        found = self.weight.new_empty(self.shape, dtype=dtype)
        fake_device.ran("dequantize", [self.weight, self.scales], [found])
        return found


class _Product(torch.autograd.Function):
    """The product with a weight that is dequantized for it, and again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        _: torch.Tensor,
        bias: torch.Tensor | None,
        layer: FourBitLinear,
    ) -> torch.Tensor:
        ctx.layer = layer
        held = [layer.full_scales()]  # until the end
        if layer.nested:
            held.append(held[0] + layer.mean_scale)
        return F.linear(inputs, layer.dequantized(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        scales = ctx.layer.full_scales()
        weight = ctx.layer.dequantized(ctx.layer.dtype)
        del scales
        weight = weight.to(grad.dtype)
        return torch.matmul(grad, weight), None, None, None
