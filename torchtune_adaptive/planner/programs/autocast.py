"""``torch.autocast`` on the fake device, by the rules that torch has for CUDA.

torch says which operations it casts there, and its documentation how: matrix products to 16 bits, what adds
up or may overflow to 32, and what combines tensors to the widest type among them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torchtune_adaptive.planner.private import FakeTensor, schema_of, tree_map_only
from torchtune_adaptive.planner.programs.imports import put
from torchtune_adaptive.planner.programs.private import device_of, is_view, kernels_of, without
from torchtune_adaptive.planner.trace import fake_device

_KEY = "AutocastPrivateUse1"
_LOWER = re.compile(
    "addbmm|addmm|addmv|addr|baddbmm|bmm|chain_matmul|einsum|(gru|lstm|rnn_relu|rnn_tanh)_cell|linalg_multi_dot|"
    "linalg_vecdot|linear|matmul|mm|mv|prelu|_?scaled_dot_product(_flash)?_attention|_thnn_fused_.*|.*conv.*"
)
"""What is computed in 16 bits."""
_WIDEST = re.compile(
    "addcdiv|addcmul|atan2|bilinear|cross|dot|grid_sampler|index_put|scatter_add|tensordot|vdot"
)
"""What is computed in the widest type of its arguments."""
_TO_TYPE = re.compile("cumprod|cumsum|linalg_(matrix|vector)_norm|log_softmax|prod|softmax|sum")
"""What is computed in 32 bits where no other type is asked for, by kernels that convert."""


class _Casts:
    """The casts of weights, which are kept until the outermost context ends."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def clear(self) -> None:
        self._kept.clear()

    def to(self, dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
        if not _is_eligible(tensor) or tensor.dtype == dtype:
            return tensor
        kept = tensor.requires_grad and tensor.is_leaf and not is_view(tensor)
        if (
            not kept
            or dtype == torch.float32
            or tensor.dtype != torch.float32
            or not torch.is_autocast_cache_enabled()
        ):
            return tensor.to(dtype)
        if id(tensor) not in self._kept:
            self._kept[id(tensor)] = tensor.to(dtype)
        return self._kept[id(tensor)]


def _is_eligible(tensor: torch.Tensor) -> bool:
    on_device = type(tensor) is FakeTensor and device_of(tensor).type == fake_device.NAME
    return on_device and tensor.is_floating_point() and tensor.dtype != torch.float64


def allow() -> None:
    """Let the fake device have autocast from now on, in all of this process."""
    casts = _Casts()
    kernels = torch.library.Library("aten", "IMPL")
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _KEY)
    for full_name in kernels_of("AutocastCUDA"):
        name = full_name.partition("::")[2]
        plain, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, plain), overload or "default")
        kernels.impl(name, _kernel(plain, operation, casts), _KEY)
    _kept.extend((kernels, others))
    clear = torch.clear_autocast_cache

    def cleared() -> None:
        casts.clear()
        clear()

    put(torch, "clear_autocast_cache", cleared)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        _of_device(torch, name)
    for name in ("set_autocast_enabled", "set_autocast_dtype"):
        _of_device(torch, name)
    _of_device(torch.amp, "is_autocast_available")
    put(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cuda"))
    begin = torch.autocast.__init__

    def begun(context: Any, device_type: str, *arguments: Any, **options: Any) -> None:
        begin(context, _named(device_type), *arguments, **options)

    put(torch.autocast, "__init__", begun)
    for name in ("custom_fwd", "custom_bwd"):
        of_device = partial(_decorated, getattr(torch.amp, name))
        put(torch.amp, name, of_device)
        put(torch.cuda.amp, name, of_device)


def in_lower_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that stands for an operation which is computed in 16 bits."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cuda"):
            to_type = partial(_Casts().to, torch.get_autocast_dtype("cuda"))
            args, kwargs = tree_map_only(torch.Tensor, to_type, (args, kwargs))
        return function(*args, **kwargs)

    return call


def _decorated(
    decorate: Callable[..., Any], function: Any = None, device_type: str = "cuda", **options: Any
) -> Any:
    """What ``torch.amp`` makes of a method of an autograd function."""
    return decorate(function, device_type=_named(device_type), **options)


_kept: list[Any] = []
"""Libraries of kernels, which end with the objects."""


def _named(device_type: Any = "cuda") -> Any:
    return fake_device.NAME if device_type == "cuda" else device_type


def _of_device(owner: Any, name: str) -> None:
    """Let a function that takes a type of device first take ``cuda`` for the fake one."""
    before = getattr(owner, name)
    put(owner, name, lambda *given: before(_named(*given[:1]), *given[1:]))


def _kernel(name: str, operation: Any, casts: _Casts) -> Callable[..., Any]:
    def call(args: Any, kwargs: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        with without(_KEY):
            args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
            return operation(*args, **kwargs)

    def lower(*args: Any, **kwargs: Any) -> Any:
        return call(args, kwargs, partial(casts.to, torch.get_autocast_dtype("cuda")))

    def higher(*args: Any, **kwargs: Any) -> Any:
        return call(args, kwargs, partial(casts.to, torch.float32))

    def widest(*args: Any, **kwargs: Any) -> Any:
        given: list[torch.dtype] = []
        tree_map_only(
            torch.Tensor, lambda one: given.append(one.dtype) if _is_eligible(one) else None, args
        )
        wide = torch.float32 if torch.float32 in given else next(iter(given), torch.float32)
        return call(args, kwargs, partial(casts.to, wide))

    def to_type(*args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in schema_of(operation).arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if _is_eligible(args[0]) and given.get("dtype") is None:
            given["dtype"] = torch.float32
        with without(_KEY):
            return operation(**given)

    if _LOWER.fullmatch(name):
        return lower
    if _WIDEST.fullmatch(name):
        return widest
    return to_type if _TO_TYPE.fullmatch(name) else higher
