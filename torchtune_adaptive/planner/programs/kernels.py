"""Kernels that a program launches by itself: nothing is computed, but what they read and write is seen.

Triton's are launched from Python, with tensors that are allocated before. Where Triton is not installed, as
beside a torch for CPUs, a stand-in lets a program take the branch that it takes on a GPU.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from torchtune_adaptive.planner.memory.gpus import Gpu
from torchtune_adaptive.planner.programs import flash
from torchtune_adaptive.planner.programs.imports import WhenImported, put
from torchtune_adaptive.planner.programs.known import forget
from torchtune_adaptive.planner.programs.stand_ins import StandIn
from torchtune_adaptive.planner.trace import fake_device

_TRITON = "triton"
_VERSION = "3.7.1"


def follow(imports: WhenImported, gpu: Gpu) -> None:
    """Let Triton's kernels only be seen from now on."""
    flash.follow(imports)
    if StandIn(_TRITON, _VERSION, _module).follow():
        return
    imports.call("triton.runtime.jit", _of_jit)
    imports.call("triton.runtime.autotuner", _of_autotuner)
    imports.call("triton.runtime.driver", lambda driver: _of_driver(driver, gpu))


def launched(name: str, *arguments: Any) -> None:
    """A kernel is launched with arguments."""
    tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
    for tensor in tensors:
        forget(tensor)
    fake_device.ran(name, tensors, ())


def _of_jit(jit: Any) -> None:
    put(jit.JITFunction, "run", _run)


def _of_autotuner(autotuner: Any) -> None:
    put(autotuner.Autotuner, "run", _run)


def _run(kernel: Any, *arguments: Any, **options: Any) -> None:
    launched(str(getattr(kernel, "__name__", _TRITON)), *arguments, *options.values())


def _of_driver(driver: Any, gpu: Gpu) -> None:
    major, minor = gpu.capability
    target = SimpleNamespace(backend="cuda", arch=10 * major + minor, warp_size=32)
    properties = {"multiprocessor_count": 132, "max_shared_mem": 232448, "warpSize": 32}
    active = {
        "get_current_device": lambda: 0,
        "get_current_stream": lambda *_: 0,
        "get_current_target": lambda: target,
        "get_active_torch_device": lambda: torch.device("cuda", 0),
        "utils": SimpleNamespace(get_device_properties=lambda *_: properties),
    }
    held = getattr(driver, "driver", driver)
    held.set_active(SimpleNamespace(**active))


class _Anything:
    """Whatever a program that defines a kernel asks of Triton; called as one, it launches it."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and callable(arguments[0]) and not options:  # a decorator
            return _Anything(getattr(arguments[0], "__name__", self.__name__))
        launched(self.__name__, *arguments, *options.values())
        return self

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)


class _Module(ModuleType):
    """A module of Triton."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)


def _module(name: str) -> ModuleType:
    made = _Module(name)
    vars(made).update(
        cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
    )
    return made
