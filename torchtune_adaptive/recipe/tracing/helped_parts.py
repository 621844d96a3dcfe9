"""Parts of torchtune and torchao that need help to be traced: activation offloading, and weights of QLoRA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from torchtune_adaptive.planner import fake_device
from torchtune_adaptive.recipe.private import offloading_module
from torchtune_adaptive.recipe.upstream import NF4Tensor


class _OnHost:
    """A stand-in for a copy of a tensor on the host, whose memory is not traced."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._like = (tensor.shape, tensor.stride())
        self._dtype = tensor.dtype
        self._nbytes = tensor.numel() * tensor.element_size()

    def copy_(self, *_: Any, **__: Any) -> None:
        fake_device.copied(self._nbytes)

    def to(self, *_: Any, **__: Any) -> torch.Tensor:
        fake_device.copied(self._nbytes)
        return torch.empty_strided(
            *self._like, dtype=self._dtype, device=torch.device(fake_device.NAME, 0)
        )


class _Torch:
    """``torch`` for torchtune's activation offloading, which uses ``torch.cuda`` by name."""

    cuda = SimpleNamespace(
        default_stream=fake_device.default_stream,
        current_stream=fake_device.current_stream,
        Stream=fake_device.FakeStream,
        stream=fake_device.in_stream,
    )

    @staticmethod
    def empty_like(tensor: torch.Tensor, **_: Any) -> _OnHost:
        return _OnHost(tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def offloading_from_fake_device() -> Iterator[None]:
    """A context in which torchtune's activation offloading works with the fake device."""
    with (
        mock.patch.object(offloading_module(), "torch", _Torch()),
        mock.patch.object(torch.Tensor, "record_stream", _record_stream),
    ):
        yield


def _record_stream(tensor: torch.Tensor, stream: Any) -> None:
    """Called with what has been brought back, where that itself is needed for longer; torch refuses a fake
    stream."""


@contextmanager
def quantizing_once() -> Iterator[None]:
    """A context in which a weight of QLoRA gets the parts of the first of its shape, as a tensor of its own.

    Quantizing takes many operations, a model has hundreds of such weights of a few shapes, and here they have
    no values. What is built in here must get parts of its own before it is traced, as ``planner.fill`` gives
    it.
    """
    quantize, known = NF4Tensor.from_tensor, dict[Any, NF4Tensor]()

    def from_tensor(weight: torch.Tensor, *sizes: int) -> NF4Tensor:
        key = (weight.shape, weight.dtype, *sizes)
        if key not in known:
            known[key] = quantize(weight, *sizes)
        first = known[key]
        names, context = first.__tensor_flatten__()
        parts = {name: getattr(first, name) for name in names}
        return NF4Tensor.__tensor_unflatten__(parts, context, first.shape, first.stride())

    with mock.patch.object(NF4Tensor, "from_tensor", from_tensor):
        yield


@contextmanager
def dequantizing_by(call: Callable[..., torch.Tensor]) -> Iterator[None]:
    """A context in which weights are dequantized through a function, as ``KnownEvents.call`` is one."""
    dequantize = NF4Tensor.get_original_weight

    def get_original_weight(weight: NF4Tensor) -> torch.Tensor:
        names, _ = weight.__tensor_flatten__()
        kind = (weight.shape, weight.dtype, weight.block_size, weight.scaler_block_size)
        return call(partial(dequantize, weight), kind, [getattr(weight, name) for name in names])

    with mock.patch.object(NF4Tensor, "get_original_weight", get_original_weight):
        yield
