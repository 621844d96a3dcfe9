"""Kernels of CUDA that fake tensors would not choose, and the memory that they allocate inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from torchtune_adaptive.planner.private import schema_of

_aten = torch.ops.aten


def _flash_backward(_grad: Any, query: torch.Tensor, *_: Any) -> list[int]:
    """Flash attention's backward pass: the gradient of the queries in fp32, and row sums."""
    batch, heads, length, dim = query.shape
    length = -(-length // 128) * 128
    unit = 32 if dim <= 128 else 64
    return [batch * length * heads * (-(-dim // unit) * unit) * 4, batch * heads * length * 4]


def _masked_scatter(values: torch.Tensor, *_: Any) -> list[int]:
    """The prefix sums of the mask, in 64 bits."""
    return [values.numel() * 8]


def _elementwise_loss(predicted: torch.Tensor, target: torch.Tensor, *_: Any) -> list[int]:
    """The loss of each element, of which the result is the sum."""
    return [torch.broadcast_shapes(predicted.shape, target.shape).numel() * predicted.itemsize]


def _softmax_backward(gradient: torch.Tensor, *_: Any) -> list[int]:
    """The product of the gradient and the result, before its sums are taken off (CUDA, torch 2.13)."""
    return [gradient.numel() * gradient.itemsize]


def _safe_softmax(scores: torch.Tensor, *_: Any) -> list[int]:
    """Which scores are minus infinity, and which rows have no others (CPU, torch 2.13)."""
    return [scores.numel(), scores.numel() // scores.shape[-1]]


def _multinomial(
    shares: torch.Tensor, number: int, replacement: bool = False, **_: Any
) -> list[int]:
    """The random numbers by which shares are divided, unless several are drawn and put back."""
    return [] if replacement and number > 1 else [shares.numel() * shares.itemsize]


def _keeping_size(loss: Any) -> Callable[..., torch.Tensor]:
    """A loss whose kernel gives its sum, one number, in memory of the size of the loss of each element."""
    at = [argument.name for argument in schema_of(loss).arguments].index("reduction")

    def result(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) > at:
            reduction, args = args[at], (*args[:at], _NONE, *args[at + 1 :])
        else:
            reduction, kwargs = kwargs.get("reduction", _MEAN), {**kwargs, "reduction": _NONE}
        elements: torch.Tensor = loss(*args, **kwargs)
        return elements if reduction == _NONE else elements.resize_(())

    return result


_NONE, _MEAN = 0, 1  # as aten counts reductions


def _grouped_product(  # type: ignore[no-untyped-def]
    left, right, offs=None, bias=None, out_dtype=None
):
    """A grouped product, whose rows are padded to 16 bytes (CPU and CUDA, torch 2.13). Fake tensors have
    those of bfloat16 only; there are kernels for all types of 16 and 32 bits."""
    shape: list[int] = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim():
        shape.insert(0, offs.shape[0] if left.dim() == 2 else left.shape[0])
    dtype = out_dtype or left.dtype
    aligned = 16 // dtype.itemsize
    width = -(-shape[-1] // aligned) * aligned
    strides = [shape[-2] * width, width, 1][-len(shape) :]
    return left.new_empty_strided(shape, strides, dtype=dtype)


_LOSSES = ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")
REPLACED: dict[Any, Callable[..., Any]] = {
    loss: _keeping_size(loss) for loss in (getattr(_aten, name).default for name in _LOSSES)
}
"""Operations that take more memory than the shape of their result says (checked on a CPU, torch 2.13)."""
REPLACED[_aten._grouped_mm.default] = _grouped_product

WORKSPACES: dict[Any, Callable[..., list[int]]] = {
    _aten.masked_scatter.default: _masked_scatter,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten._safe_softmax.default: _safe_softmax,
    _aten.multinomial.default: _multinomial,
    _aten.mse_loss.default: _elementwise_loss,
    _aten.smooth_l1_loss.default: _elementwise_loss,
}


_softmax = F.softmax


def softmax(
    values: torch.Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``softmax`` as CUDA has it: its kernel takes float16 and gives float32, which others convert before."""
    if dim is not None and (values.dtype, dtype) == (torch.float16, torch.float32):
        return _aten._softmax(values, dim, True)
    return _softmax(values, dim, _stacklevel, dtype)


def attention(  # type: ignore[no-untyped-def]
    before_ampere,
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
):
    """``scaled_dot_product_attention`` with the kernels that it selects on CUDA. There are fewer for GPUs
    older than Ampere."""
    # Flash attention's kernels have one width for queries and values, of up to 256.
    flash = query.shape[-1] == value.shape[-1] <= 256 and not before_ampere
    if attn_mask is None and flash and query.dtype != torch.float32:
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    # Only flash attention's kernels share heads of keys and values; those of bfloat16 all need Ampere.
    in_bfloat16 = query.dtype == torch.bfloat16
    if query.shape[1] != key.shape[1] or (before_ampere and in_bfloat16):
        return _aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
                attn_mask.logical_not(), float("-inf")
            )
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
