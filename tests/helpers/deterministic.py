"""A CPU that refuses what torch refuses on CUDA in deterministic mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def _of_floats(values: torch.Tensor, *_: Any, **named: Any) -> bool:
    dtype = named.get("dtype") or values.dtype
    return dtype.is_floating_point or dtype.is_complex


def _always(*_: Any, **__: Any) -> bool:
    return True


REFUSED: dict[str, tuple[str, Callable[..., bool]]] = {
    "cumsum": ("torch.cumsum", _of_floats),
    "cumsum_": ("torch.cumsum", _of_floats),
    "nll_loss2d_forward": ("torch.nn.NLLLoss", _always),
    "median.dim": ("torch.median", _always),
    "nanmedian.dim": ("torch.median", _always),
    "histc": ("torch.histc", _always),
    "bincount": ("torch.bincount", lambda values, weights=None, minlength=0: weights is not None),
    "put_": ("torch.Tensor.put_", _always),
    "scatter_reduce.two": (
        "torch.Tensor.scatter_reduce",
        lambda self, dim, index, src, reduce, **_: reduce == "prod",
    ),
    "grid_sampler_2d_backward": ("grid_sample", _always),
    "grid_sampler_3d_backward": ("grid_sample", _always),
    "upsample_linear1d_backward": ("interpolate", _always),
    "upsample_bilinear2d_backward": ("interpolate", _always),
    "upsample_bicubic2d_backward": ("interpolate", _always),
    "_upsample_bilinear2d_aa_backward": ("interpolate", _always),
    "_upsample_bicubic2d_aa_backward": ("interpolate", _always),
    "_adaptive_avg_pool2d_backward": ("torch.nn.AdaptiveAvgPool2d", _always),
    "reflection_pad1d_backward": ("torch.nn.ReflectionPad1d", _always),
    "reflection_pad2d_backward": ("torch.nn.ReflectionPad2d", _always),
    "_ctc_loss_backward": ("torch.nn.CTCLoss", _always),
    "avg_pool3d_backward": ("torch.nn.AvgPool3d", _always),
}
"""Operators of training, generation and rewards that torch refuses: how its documentation names them, and
with which arguments."""


class RefusedOnCuda(TorchDispatchMode):
    """Raises as torch would on CUDA after ``use_deterministic_algorithms(True)``; counts what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).removeprefix("aten.").removesuffix(".default")
        documented, is_refused = REFUSED.get(name, ("", None))
        if is_refused is not None and is_refused(*args, **kwargs):
            raise RuntimeError(f"{name} has no deterministic implementation ({documented})")
        self.passed += 1
        return func(*args, **kwargs)
