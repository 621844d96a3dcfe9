"""A compiled layer of packed rows, as the compiler splits it on a GPU.

Attention to packed rows is flex attention, which torchtune compiles by itself and the compiler may not enter.
So a layer is not one region but four: the norm before attention, the projections up to attention, the
projection after it, and the rest. What one hands to another is kept as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchtune.modules import MultiHeadAttention, TransformerSelfAttentionLayer

from torchtune_adaptive.recipe.private import attending_with

Compile = Callable[[Callable[..., Any], Any, str], Callable[..., Any]]
"""Makes a region of a function, the module that it uses, and a name for what it does in every layer."""


def is_split(layer: object) -> bool:
    """Whether a layer of packed rows is split in this way."""
    return isinstance(layer, TransformerSelfAttentionLayer) and isinstance(
        layer.attn, MultiHeadAttention
    )


def in_four_regions(layer: Any, compiled: Compile) -> Callable[..., torch.Tensor]:
    """The forward pass of a layer."""
    attn = layer.attn

    def projected(h: torch.Tensor, input_pos: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values. What the layer makes of attention is not used, so not compiled."""
        found: list[torch.Tensor] = []

        def attention(*given: torch.Tensor, **_: Any) -> torch.Tensor:
            found.extend(given)
            return given[0]

        with attending_with(attn, attention):
            attn(h, h, input_pos=input_pos)
        return tuple(found)

    def merged(heads: torch.Tensor) -> torch.Tensor:
        heads = heads.transpose(1, 2).contiguous()
        output: torch.Tensor = attn.output_proj(heads.flatten(2))
        return output

    def rest(attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = layer.sa_scale(attended) + x
        output: torch.Tensor = h + layer.mlp_scale(layer.mlp(layer.mlp_norm(h)))
        return output

    norm = compiled(lambda x: layer.sa_norm(x), layer.sa_norm, "norm")
    before = compiled(projected, attn, "before attention")
    after = compiled(merged, attn.output_proj, "after attention")
    end = compiled(rest, layer, "after the output projection")

    def forward(
        x: torch.Tensor, *, mask: Any = None, input_pos: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        heads: Any = _FlexAttention.apply(*before(norm(x), input_pos))
        output: torch.Tensor = end(after(heads), x)
        return output

    return forward


class _FlexAttention(torch.autograd.Function):
    """What the kernels of flex attention keep and allocate, without what is computed."""

    @staticmethod
    def forward(context: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(q)
        context.save_for_backward(q, k, v, output, _row_sums(q))
        return output

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, _, _ = context.saved_tensors
        sums = _row_sums(q)
        found = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        del sums
        return found


def _row_sums(q: torch.Tensor) -> torch.Tensor:
    return torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
