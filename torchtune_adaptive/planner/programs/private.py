"""All private interfaces that running a program on the fake device needs, as there is no public way.

Checked on torch 2.13, where it does not say otherwise.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.data._utils import fetch

from torchtune_adaptive.planner.private import FakeTensor, without_modes

_device = FakeTensor.device.fget


def device_of(tensor: FakeTensor) -> torch.device:
    """The device of a fake tensor, whatever programs are told of it."""
    return _device(tensor)  # type: ignore[no-any-return, misc]


def let_see(device: Callable[[FakeTensor], torch.device]) -> None:
    """Let everybody see this device of a fake tensor."""
    FakeTensor.device = property(device, FakeTensor.device.fset)  # type: ignore[assignment, method-assign]


def kernels_of(key: str) -> list[str]:
    """The names of the operations that have a kernel for a dispatch key."""
    return torch._C._dispatch_get_registrations_for_dispatch_key(key)


@contextmanager
def without(key: str) -> Iterator[None]:
    """A context in which kernels of a dispatch key are passed over."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    with torch._C._ExcludeDispatchKeyGuard(keys):
        yield


@contextmanager
def without_any_mode() -> Iterator[None]:
    """A context in which nothing follows what is called, neither operations nor functions."""
    modes = []
    while _get_current_function_mode_stack():
        modes.append(_pop_mode())
    try:
        with without_modes():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def fetchers() -> Iterable[Any]:
    """What gets the rows of a batch from a dataset, and collates them, for a loader: by ``fetch``, with
    ``dataset`` and ``collate_fn``."""
    return fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher


def of_modules(apply: Callable[..., Any]) -> None:
    """Let modules convert and move their tensors by a function: of the module, that which converts one
    tensor, and the method as it was."""
    before = torch.nn.Module._apply

    def _apply(module: Any, function: Any, recurse: bool = True) -> Any:
        return apply(module, function, functools.partial(before, module, function, recurse))

    torch.nn.Module._apply = _apply  # type: ignore[method-assign]


def have_parts_of_cuda() -> None:
    """Let torch have what a build for CUDA has and other libraries take as they are imported: bitsandbytes
    (0.50) and Triton (3.7)."""
    torch._C._cuda_getCurrentRawStream = lambda *_: 0  # type: ignore[attr-defined]


def swap_tensors(before: Callable[[Any, Any], None], one: Any, other: Any) -> None:
    """Swap two tensors, of which fake ones may be in a memo of their mode's, which holds no harm."""
    with mock.patch.object(weakref, "getweakrefs", lambda _: []):
        before(one, other)
