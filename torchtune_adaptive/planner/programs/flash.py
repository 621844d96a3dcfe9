"""The packages of flash attention: what their functions allocate, read, write and compute.

Their kernels are built for GPUs alone, so that nothing of these packages runs here. The memory is that of
``flash-attn`` 2.8; that of its version 3, for Hopper, is about the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner.programs.imports import WhenImported, put
from torchtune_adaptive.planner.programs.known import values_of
from torchtune_adaptive.planner.programs.stand_ins import StandIn
from torchtune_adaptive.planner.trace import fake_device

_BLOCK = 128
"""The rows that a kernel works on at a time, and has memory of its own for."""


def follow(imports: WhenImported) -> None:
    """Let programs find these packages from now on, and those that are on the Hub."""
    name = "flash_attn.flash_attn_interface"
    interface = sys.modules[name] = _module(name)  # type: ignore[assignment]
    _MODULES["flash_attn"] |= {"flash_attn_interface": interface}
    StandIn("flash-attn", "2.8.3", "flash_attn", _module).follow()
    StandIn("flash-attn-3", "3.0.0", "flash_attn_interface", _module).follow()
    imports.call("kernels", lambda it: put(it, "get_kernel", _of_hub))


class _How(NamedTuple):
    """What is asked of attention, and the lengths of queries and keys in each row."""

    rows: tuple[tuple[int, int], ...] | None
    """None where rows have a dimension, and do not follow each other in that of the length."""
    causal: bool
    window: tuple[int, int]
    deterministic: bool

    def parts(self, *packed: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values, of which some may be in one tensor."""
        dims = 4 if self.rows is None else 3
        return [part for one in packed for part in (one.unbind(-3) if one.dim() > dims else (one,))]


class _Attention(torch.autograd.Function):
    """Attention, forward and backward."""

    @staticmethod
    def forward(ctx: Any, how: _How, *packed: torch.Tensor) -> Any:
        size = packed[0].shape[-1]
        packed = tuple(_padded(one) for one in packed)
        query, key, value = how.parts(*packed)
        _check(query, key, value)
        out = torch.empty_like(query)
        *rows, length, heads, _ = query.shape
        log_sum = query.new_empty((*rows, heads, length), dtype=torch.float32)
        random = query.new_empty(2, dtype=torch.int64)
        _ran("flash_attention", 4, how, query, key, [query, key, value], [out, log_sum])
        ctx.save_for_backward(*packed, out, log_sum, random)
        ctx.how = how
        ctx.mark_non_differentiable(log_sum)
        return out[..., :size], log_sum

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        *packed, out, log_sum, _ = ctx.saved_tensors
        gradients = [torch.empty_like(one) for one in packed]
        size, gradient = gradient.shape[-1], _padded(gradient)
        query, key, value = ctx.how.parts(*packed)
        inside = _inside(ctx.how, query, key)
        reads = [gradient, query, key, value, out, log_sum]
        _ran("flash_attention_backward", 10, ctx.how, query, key, reads, gradients)
        del inside
        return None, *(one[..., :size] for one in gradients)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose heads have a multiple of 8 numbers."""
    return F.pad(tensor, (0, -tensor.shape[-1] % 8)) if tensor.shape[-1] % 8 else tensor


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse what the kernels refuse."""
    if {one.dtype for one in (query, key, value)} not in ({torch.float16}, {torch.bfloat16}):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if torch.cuda.get_device_capability() < (8, 0):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if query.shape[-1] > 256:
        raise RuntimeError("FlashAttention only supports head dimension at most 256")


def _inside(how: _How, query: torch.Tensor, key: torch.Tensor) -> list[torch.Tensor]:
    """What the backward kernel allocates: sums of rows, the gradient of queries in float32, and, where heads
    share keys, the gradients of keys and values for each head."""
    *rows, length, heads, size = query.shape
    length = -(-length // _BLOCK) * _BLOCK if rows else length + _BLOCK * len(how.rows or ())
    width = -(-size // 32) * 32 if size <= 192 else 256
    splits = []
    if how.deterministic:
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        splits.append(-(-processors // (heads * len(query if rows else how.rows or ()))))
    made = [
        query.new_empty((*rows, heads, length), dtype=torch.float32),
        query.new_empty((*splits, *rows, length, heads, width), dtype=torch.float32),
    ]
    if key.shape[-2] != heads:
        made += [key.new_empty((*key.shape[:-2], heads, size)) for _ in range(2)]
    return made


def _ran(  # type: ignore[no-untyped-def]
    name: str, flops: int, how: _How, query: torch.Tensor, key: torch.Tensor, reads, writes
) -> None:
    """Note a kernel, which takes so many FLOPs for each number of each query and a key that it sees."""
    rows = how.rows or ((query.shape[1], key.shape[1]),) * len(query)
    left, right = how.window
    pairs = sum(_pairs(*row, left, 0 if how.causal else right) for row in rows)
    heads, size = query.shape[-2:]
    keys = sum(row[1] for row in rows) / len(rows)
    shape = (len(rows) * heads, query.shape[:-2].numel() / len(rows), keys, size)
    dtype = str(query.dtype).removeprefix("torch.")
    products = fake_device.Products(flops * heads * size * pairs, dtype, shape)
    fake_device.ran(name, reads, writes, products=products)


@cache
def _pairs(queries: int, keys: int, left: int, right: int) -> int:
    """The number of pairs of a query and a key that it sees: of those up to so many on both sides, or of all
    if that is negative. The last query and the last key are at the same place."""
    left, right = (side if side >= 0 else queries + keys for side in (left, right))
    places = range(keys - queries, keys)
    return sum(max(0, min(keys, at + right + 1) - max(0, at - left)) for at in places)


_OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
_OF_VERSION_3 = {
    "softmax_scale": None,
    "causal": False,
    **dict.fromkeys(("qv", "q_descale", "k_descale", "v_descale")),
    "window_size": (-1, -1),
    "attention_chunk": 0,
    "softcap": 0.0,
    "num_splits": 1,
    "pack_gqa": None,
    "deterministic": False,
    "sm_margin": 0,
    "return_attn_probs": False,
}
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_LENGTHS_OF_ALL = ("cu_seqlens", "max_seqlen")


def _function(
    tensors: str, options: Mapping[str, Any], lengths: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """A function of these packages, which takes tensors, perhaps the lengths of rows, and options."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    signature = Signature(
        [Parameter(name, kind) for name in (*tensors.split(), *lengths)]
        + [Parameter(name, kind, default=value) for name, value in options.items()]
    )

    def attend(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        given = bound.arguments
        rows = _rows(*(given[name] for name in lengths)) if lengths else None
        how = _How(rows, given["causal"], tuple(given["window_size"]), given["deterministic"])
        out, log_sum = _Attention.apply(how, *(given[name] for name in tensors.split()))
        return (out, log_sum, out.new_empty(0)) if given["return_attn_probs"] else out

    attend.__signature__ = signature  # type: ignore[attr-defined]
    return attend


def _rows(*lengths: Any) -> tuple[tuple[int, int], ...]:
    """The lengths of rows, by where each begins; as long as the longest where that is not known."""
    found = []
    for begins, longest in zip(
        lengths[: len(lengths) // 2], lengths[len(lengths) // 2 :], strict=True
    ):
        values = values_of(begins)
        each = [int(longest)] * (len(begins) - 1) if values is None else values.diff().tolist()
        found.append(each)
    return tuple(zip(found[0], found[-1], strict=True))


def _with_cache(*_: Any, **__: Any) -> Any:
    raise NoPrediction(
        "flash_attn_with_kvcache: is for inference, which is not planned. Train with flash_attn_func."
    )


def _unpadded(hidden: torch.Tensor, mask: torch.Tensor, unused: torch.Tensor | None = None) -> Any:
    """The tokens that a mask has, without the others."""
    counts = mask.sum(-1, dtype=torch.int32)
    kept = mask if unused is None else mask + unused
    places = kept.flatten().nonzero().flatten()
    begins = F.pad(kept.sum(-1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    return _first(hidden.flatten(0, 1), places), places, begins, int(kept.sum(-1).max()), counts


def _first(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(0, places)


def _put_first(values: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
    return values.new_zeros((size, *values.shape[1:])).index_copy_(0, places, values)


def _as_padded(hidden: torch.Tensor, places: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    return _put_first(hidden, places, rows * length).unflatten(0, (rows, length))


class _Kernels:
    """The kernels themselves, which xformers looks for as it is imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NoPrediction(
            f"flash_attn_gpu.{name}: is called without the functions of flash_attn, and not planned. Train "
            "with flash_attention_2."
        )


_IN_ROWS = {**_OPTIONS, "block_table": None}
_VERSION_2 = {
    "flash_attn_func": _function("q k v", _OPTIONS),
    "flash_attn_kvpacked_func": _function("q kv", _OPTIONS),
    "flash_attn_qkvpacked_func": _function("qkv", _OPTIONS),
    "flash_attn_varlen_func": _function("q k v", _IN_ROWS, _LENGTHS),
    "flash_attn_varlen_kvpacked_func": _function("q kv", _OPTIONS, _LENGTHS),
    "flash_attn_varlen_qkvpacked_func": _function("qkv", _OPTIONS, _LENGTHS_OF_ALL),
    "flash_attn_with_kvcache": _with_cache,
}
_IN_ROWS_3 = {"seqused_q": None, "seqused_k": None, **_OF_VERSION_3}
_VERSION_3 = {
    "flash_attn_func": _function("q k v", _OF_VERSION_3),
    "flash_attn_varlen_func": _function("q k v", _IN_ROWS_3, _LENGTHS),
    "flash_attn_with_kvcache": _with_cache,
}
_MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": _VERSION_2,
    "flash_attn.flash_attn_interface": _VERSION_2 | {"flash_attn_gpu": _Kernels()},
    "flash_attn.bert_padding": {
        "unpad_input": _unpadded,
        "pad_input": _as_padded,
        "index_first_axis": _first,
        "index_put_first_axis": _put_first,
    },
    "flash_attn_interface": _VERSION_3,
}
_ON_HUB = {
    "flash-attn": "flash_attn",
    "flash-attn2": "flash_attn",
    "flash-attn3": "flash_attn_interface",
    "vllm-flash-attn3": "flash_attn_interface",
}


def _module(name: str) -> ModuleType | None:
    if name not in _MODULES:
        return None
    made = ModuleType(name)
    vars(made).update(_MODULES[name])
    return made


def _of_hub(repository: str, *_: Any, **__: Any) -> ModuleType | None:
    """A package of kernels on the Hub.

    Raises:
        NoPrediction: nothing is known of its kernels.
    """
    name = repository.rpartition("/")[2]
    if name not in _ON_HUB:
        raise NoPrediction(
            f"{repository}: its kernels, which are built for GPUs alone, are not planned. Plan without them, "
            "or with kernels-community/flash-attn2."
        )
    return _module(_ON_HUB[name])
