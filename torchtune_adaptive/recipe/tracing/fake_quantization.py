"""Weights of QLoRA without values: what is done with one of a shape is done with all of it.

Quantizing and dequantizing take many operations, and a model has hundreds of such weights of a few shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from torchtune_adaptive.recipe.upstream import NF4Tensor


@contextmanager
def quantizing_once() -> Iterator[None]:
    """A context in which a weight of QLoRA gets the parts of the first of its shape, as a tensor of its own.

    What is built in here must get parts of its own before it is traced, as ``planner.fill`` gives it.
    """
    before = vars(NF4Tensor)["from_tensor"]
    quantize, known = NF4Tensor.from_tensor, dict[Any, NF4Tensor]()

    def from_tensor(weight: torch.Tensor, *sizes: int) -> NF4Tensor:
        key = (weight.shape, weight.dtype, *sizes)
        if key not in known:
            known[key] = quantize(weight, *sizes)
        first = known[key]
        names, context = first.__tensor_flatten__()
        parts = {name: getattr(first, name) for name in names}
        return NF4Tensor.__tensor_unflatten__(parts, context, first.shape, first.stride())

    NF4Tensor.from_tensor = from_tensor
    try:
        yield
    finally:
        NF4Tensor.from_tensor = before


@contextmanager
def dequantizing_by(call: Callable[..., torch.Tensor]) -> Iterator[None]:
    """A context in which weights are dequantized through a function, as ``KnownEvents.call`` is one."""
    dequantize = NF4Tensor.get_original_weight

    def get_original_weight(weight: NF4Tensor) -> torch.Tensor:
        names, _ = weight.__tensor_flatten__()
        kind = (weight.shape, weight.dtype, weight.block_size, weight.scaler_block_size)
        return call(partial(dequantize, weight), kind, [getattr(weight, name) for name in names])

    NF4Tensor.get_original_weight = get_original_weight
    try:
        yield
    finally:
        NF4Tensor.get_original_weight = dequantize
