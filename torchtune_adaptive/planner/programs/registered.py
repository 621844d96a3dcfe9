"""Kernels that libraries have for operations of their own: those in Python run, and what they do is seen.

A library registers them with torch for GPUs. There they allocate what they need, and launch by Triton or by a
library in C, of which the pointers that it is given tell what it reads and writes.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchtune_adaptive.planner.private import FakeTensor
from torchtune_adaptive.planner.programs.imports import put
from torchtune_adaptive.planner.trace import fake_device

_WHERE = ("cuda", "default", None)
"""Where a kernel runs that GPUs have, the first first."""
_kernels: dict[str, dict[str | None, Callable[..., Any]]] = {}
"""Kernels by the name of their operation and where they run."""
_pointed: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""Tensors by the pointers to them."""


def follow(face: AbstractContextManager[Any]) -> None:
    """Have kernels from now on, which run where functions of torch take ``cuda`` for the fake device."""
    register = torch.library.register_kernel

    def registered(operation: Any, places: Any, kernel: Any = None, /, **options: Any) -> Any:
        if kernel is None:
            return functools.partial(registered, operation, places, **options)
        name = operation if isinstance(operation, str) else operation.name()

        def run(*args: Any, **kwargs: Any) -> Any:
            with face:
                return kernel(*args, **kwargs)

        for place in {places} if places is None or isinstance(places, str) else {*places}:
            _kernels.setdefault(name, {})[place] = run
        return register(operation, places, kernel, **options) or kernel

    put(torch.library, "register_kernel", registered)
    put(FakeTensor, "data_ptr", _pointer)


def kernel_of(name: str) -> Callable[..., Any] | None:
    """The kernel that an operation has on GPUs; None if no library has one in Python."""
    found = _kernels.get(name, {})
    return next((found[place] for place in _WHERE if place in found), None)


def replace(name: str, kernel: Callable[..., Any]) -> None:
    """Let an operation have another kernel."""
    _kernels.setdefault(name, {})["cuda"] = kernel


def launched(name: str, *arguments: Any) -> int:
    """A function of a library in C launches a kernel; no error."""
    given = (one.value if isinstance(one, ctypes.c_void_p) else one for one in arguments)
    pointed = (_pointed.get(one) for one in given if type(one) is int)
    fake_device.ran(name, [one for one in pointed if one is not None], ())
    return 0


def _pointer(tensor: torch.Tensor) -> int:
    """A number that stands for the place of a tensor in a memory that is not there."""
    place = id(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.itemsize
    _pointed[place] = tensor
    return place
