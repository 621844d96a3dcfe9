"""Kernels that a program launches by Triton: nothing is computed, but what they read and write is seen.

They are launched from Python, with tensors that are allocated before. What tunes them runs, with memory of
its own. Where Triton is not installed, as beside a torch for CPUs, a stand-in lets a program take the branch
that it takes on a GPU.
"""

from __future__ import annotations

from functools import cache, partial
from inspect import isfunction, signature
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner.memory.gpus import Gpu
from torchtune_adaptive.planner.programs import flash, registered
from torchtune_adaptive.planner.programs.imports import WhenImported, put
from torchtune_adaptive.planner.programs.kernel_code import written
from torchtune_adaptive.planner.programs.known import forget
from torchtune_adaptive.planner.programs.stand_ins import StandIn
from torchtune_adaptive.planner.trace import fake_device

_TRITON = "triton"
_VERSION = "3.7.1"


def follow(imports: WhenImported, gpu: Gpu) -> None:
    """Let Triton's kernels only be seen from now on."""
    flash.follow(imports)
    put(torch.library, "triton_op", _operation)
    put(torch.library, "wrap_triton", lambda kernel: kernel)
    if StandIn(_TRITON, _VERSION, _TRITON, _module).follow():
        return
    imports.call("triton.runtime.jit", _of_jit)
    imports.call(
        "triton.runtime.autotuner", lambda it: put(it.Autotuner, "check_disk_cache", _tuned)
    )
    imports.call("triton.runtime.driver", lambda driver: _of_driver(driver, gpu))


def uncounted() -> tuple[str, ...]:
    """The kernels launched in steps whose matrix products nobody has counted."""
    return tuple(sorted(_multiplying))


_multiplying: set[str] = set()


def _launched(function: Any, *arguments: Any, **named: Any) -> None:
    """A kernel, which a function describes, is launched with arguments."""
    given = dict(zip(signature(function).parameters, arguments, strict=False)) | named
    tensors = [one for one in given.values() if isinstance(one, torch.Tensor)]
    for name in written(function) & given.keys():
        forget(given[name])
    if _multiplies(function):
        _multiplying.add(function.__name__)
    fake_device.ran(function.__name__, tensors, ())


@cache
def _multiplies(function: Any) -> bool:
    """Whether a kernel, or one that it calls, multiplies matrices."""
    names = function.__code__.co_names
    called = (getattr(function.__globals__.get(name), "fn", None) for name in names)
    return "dot" in names or any(_multiplies(one) for one in called if isfunction(one))


def _operation(name: str, function: Any = None, /, **options: Any) -> Any:
    """An operation that launches kernels of Triton's: what it does is seen."""
    if function is None:
        return partial(_operation, name, **options)
    registered.replace(name, function)
    return torch.library.custom_op(name, function, **options)


def _of_jit(jit: Any) -> None:
    def run(kernel: Any, *arguments: Any, warmup: bool = False, **options: Any) -> None:
        if not warmup:
            _launched(kernel.fn, *arguments, **options)

    put(jit.JITFunction, "run", run)


def _tuned(_: Any, key: Any, configs: Any, tune: Any) -> bool:
    """Tune a kernel, and keep nothing of that for later runs, which are on a GPU."""
    tune()
    return False


def _of_driver(module: Any, gpu: Gpu) -> None:
    """Let Triton have its driver for CUDA, without the library that it asks about the device."""
    kind = module.backends["nvidia"].driver
    driver = kind.__new__(kind)
    super(kind, driver).__init__()
    properties = {
        "multiprocessor_count": torch.cuda.get_device_properties(0).multi_processor_count,
        "max_shared_mem": _SHARED.get(gpu.capability, 101376),
        "warpSize": 32,
    }
    driver.utils = SimpleNamespace(get_device_properties=lambda *_: properties)
    module.driver.set_active(driver)


_SHARED = {(7, 0): 98304, (7, 5): 65536, (8, 0): 166912, (9, 0): 232448, (10, 0): 232448}
"""Bytes that threads of a block can share, by the capability, where it is not what most have."""


class _Anything:
    """Whatever a program asks of Triton as it defines a kernel; as a decorator it gives the kernel."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *arguments: Any, **__: Any) -> Any:
        described = arguments[0] if arguments else None
        if isinstance(described, _TritonKernel):
            return described
        return _TritonKernel(described) if isfunction(described) else self

    def __iter__(self) -> Any:
        raise NoPrediction(
            "triton: is not installed, and the program asks it for more than to launch kernels. Install it "
            f"beside torch (pip install triton=={_VERSION}), which needs no GPU."
        )

    def __or__(self, _: Any) -> Any:  # in what is said about types
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)


class _TritonKernel(_Anything):
    """A kernel of a program's."""

    def __init__(self, function: Any) -> None:
        self.fn, self.__name__ = function, function.__name__

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> None:
        _launched(self.fn, *arguments, **options)

    def run(self, *arguments: Any, **options: Any) -> None:
        self(*arguments, **options)


class _TritonConstant(_Anything):
    """A number, or what else a kernel is compiled for."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


class _TritonModule(ModuleType):
    """A module of Triton."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found: Any = _KINDS.get(name) or (_Anything if name[0].isupper() else _Anything())
        setattr(self, name, found)
        return found


_KINDS = {
    "constexpr": _TritonConstant,
    **dict.fromkeys(("JITFunction", "Autotuner", "Heuristics"), _TritonKernel),
}


def _module(name: str) -> ModuleType:
    made = _TritonModule(name)
    vars(made).update(
        cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
    )
    return made
