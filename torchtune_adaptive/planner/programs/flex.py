"""Flex attention: what its kernels, which are compiled for a GPU, allocate, read, write and compute.

Memory is as the templates of Inductor have it (torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

import torch

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner.programs.imports import WhenImported, put
from torchtune_adaptive.planner.programs.known import values_of
from torchtune_adaptive.planner.trace import fake_device

_MODULE = "torch.nn.attention.flex_attention"


class FlexAttention:
    """Lets a program call flex attention where it compiles it; ``unrecorded`` is a context in which nothing
    is recorded."""

    def __init__(self, unrecorded: Callable[[], AbstractContextManager[None]]) -> None:
        self._unrecorded = unrecorded
        self.within = False
        """Whether the program has called something compiled, which may call it."""
        self._compiled: list[tuple[Any, Callable[..., Any]]] = []

    def follow(self, imports: WhenImported) -> None:
        """Let it from now on."""
        imports.call(_MODULE, self._of_module)

    def compiled(self, function: Any) -> Callable[..., Any] | None:
        """What stands for one of its functions where that is compiled by itself; None for all others."""
        return next((instead for one, instead in self._compiled if one is function), None)

    def _of_module(self, module: Any) -> None:
        create, parameters = module.create_block_mask, signature(module.flex_attention)

        def created(*arguments: Any, **options: Any) -> Any:
            with self._unrecorded():  # which blocks of it there are is all that a kernel writes
                return create(*arguments, **options)

        def attend(*arguments: Any, **options: Any) -> Any:
            bound = parameters.bind(*arguments, **options)
            bound.apply_defaults()
            return _attend(bound.arguments, module.AuxOutput)

        def called(*arguments: Any, **options: Any) -> Any:
            if self.within:
                return attend(*arguments, **options)
            raise NoPrediction(
                "flex_attention: is called without torch.compile, and would make the scores of all tokens. "
                "Compile it: torch.compile(flex_attention)."
            )

        put(module, "flex_attention", called)
        self._compiled = [(create, created), (called, attend)]


def _attend(given: Mapping[str, Any], both: Callable[..., Any]) -> Any:
    query, key, value = given["query"], given["key"], given["value"]
    pairs = _pairs(query, key, given["block_mask"])
    out, log_sum, highest = _FlexKernels.apply(pairs, query, key, value)
    if (asked := given["return_aux"]) is not None:
        return out, both(log_sum if asked.lse else None, highest if asked.max_scores else None)
    return (out, log_sum) if given["return_lse"] else out


def _pairs(query: torch.Tensor, key: torch.Tensor, mask: Any) -> int:
    """The pairs of a query and a key in the blocks of a mask; of all, where the blocks are not known."""
    everything = query.shape[:-1].numel() * key.shape[-2]
    blocks = [] if mask is None else [mask.kv_num_blocks, mask.full_kv_num_blocks]
    counts = [values_of(one) for one in blocks if one is not None]
    found = [one for one in counts if one is not None]
    if not found or len(found) < len(counts):
        return everything
    alike = query.shape[:2].numel() / found[0].shape[:2].numel()
    pairs = alike * math.prod(mask.BLOCK_SIZE) * sum(int(one.sum()) for one in found)
    return min(everything, int(pairs))


class _FlexKernels(torch.autograd.Function):
    """Attention, forward and backward."""

    @staticmethod
    def forward(ctx: Any, pairs: int, *given: torch.Tensor) -> Any:
        query, _, value = given
        out = torch.empty_like(query)
        if value.shape[-1] != query.shape[-1]:
            out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        log_sum = query.new_empty(query.shape[:-1], dtype=torch.float32)
        highest = torch.empty_like(log_sum)
        _ran("flex_attention", 4, pairs, [*given], [out, log_sum, highest])
        ctx.save_for_backward(*given, out, log_sum)
        ctx.pairs = pairs
        ctx.mark_non_differentiable(highest)
        return out, log_sum, highest

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        *given, out, log_sum = ctx.saved_tensors
        delta = torch.empty_like(log_sum)
        fake_device.ran("flex_attention_delta", [out, gradient], [delta])
        rows = len(given[0])
        gradients = [torch.empty_like(one.expand(rows, -1, -1, -1)) for one in given]
        reads = [*given, gradient, log_sum, delta]
        _ran("flex_attention_backward", 10, ctx.pairs, reads, gradients)
        return None, *map(torch.Tensor.sum_to_size, gradients, (one.shape for one in given))


def _ran(
    name: str, flops: int, pairs: int, reads: list[torch.Tensor], writes: list[torch.Tensor]
) -> None:
    """Note a kernel, which takes so many FLOPs for each number of each query and a key that it sees."""
    query, key, *_ = reads
    rows, heads, length, size = query.shape
    shape = (rows * heads, length, key.shape[-2], size)
    dtype = str(query.dtype).removeprefix("torch.")
    products = fake_device.Products(flops * size * pairs, dtype, shape)
    fake_device.ran(name, reads, writes, products=products)
