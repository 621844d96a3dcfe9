"""torchtune's activation offloading on the fake device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from torchtune_adaptive.planner import fake_device
from torchtune_adaptive.recipe.private import offloading_module


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
def for_offloading() -> Iterator[None]:
    """Let torchtune's activation offloading work with the fake device."""
    module, record = offloading_module(), torch.Tensor.record_stream
    module.torch = _Torch()
    # Of what it has brought back, where that itself is needed for longer; torch refuses a fake stream.
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        module.torch = torch
        torch.Tensor.record_stream = record  # type: ignore[method-assign]
