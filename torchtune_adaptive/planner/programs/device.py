"""The fake device as a program sees it: ``cuda:0``, a GPU of the kind that is planned for."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from torchtune_adaptive.planner.memory.gpus import Gpu
from torchtune_adaptive.planner.private import FakeTensor
from torchtune_adaptive.planner.programs.imports import put
from torchtune_adaptive.planner.programs.known import (
    ProgramWatch,
    is_cuda,
    is_ours,
    note,
    values_of,
)
from torchtune_adaptive.planner.programs.private import (
    calls_are_seen,
    device_of,
    have_parts_of_cuda,
    let_see,
)
from torchtune_adaptive.planner.programs.unknown import Assumed, UnknownNumber
from torchtune_adaptive.planner.speed.devices import SPEEDS
from torchtune_adaptive.planner.trace import fake_device
from torchtune_adaptive.planner.trace.recorder import Recorder

_CUDA = torch.device("cuda", 0)
_CUDA_VERSION = "12.8"
_THREADS = {(7, 5): 1024, **dict.fromkeys(((8, 6), (8, 9), (12, 0)), 1536)}
"""Threads of a multiprocessor, by the capability, where these are not 2,048."""
_Tensor = torch.Tensor
_OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions that make a tensor of numbers, which are on the host."""


def ours(value: Any) -> Any:
    """The fake device for ``cuda``; everything else as it is."""
    return fake_device.device() if is_cuda(value) else value


class Face(TorchFunctionMode):
    """Lets functions of torch take ``cuda`` for the fake device, and answers what asks for values there."""

    def __init__(self, watch: ProgramWatch, assumed: Assumed) -> None:
        super().__init__()
        self._watch, self._assumed = watch, assumed
        self._instead: dict[Any, Callable[..., Any]] = {
            _Tensor.item: self._item,
            _Tensor.tolist: self._list,
            _Tensor.__float__: self._number(float),
            _Tensor.__int__: self._number(int),
            _Tensor.__index__: self._number(int),
            _Tensor.__bool__: self._number(bool),
            _Tensor.numpy: self._array,
            _Tensor.__array__: self._array,
            _Tensor.__format__: lambda tensor, form="": format(self._item(tensor), form),
            _Tensor.cuda: lambda tensor, *_, **__: tensor.to(_CUDA),
            _Tensor.pin_memory: lambda tensor, *_: tensor,
            _Tensor.is_cuda.__get__: lambda tensor: is_on_device(tensor),  # type: ignore
            _Tensor.get_device: lambda tensor: 0 if is_on_device(tensor) else -1,
            **{one: _indexing(one) for one in (_Tensor.__getitem__, _Tensor.__setitem__)},
            **{one: self._finite(one, False) for one in (torch.isnan, torch.isinf)},
            **{one: self._finite(one, False) for one in (_Tensor.isnan, _Tensor.isinf)},
            **{one: self._finite(one, True) for one in (torch.isfinite, _Tensor.isfinite)},
            **dict.fromkeys((torch.nanmean, _Tensor.nanmean), torch.mean),  # for the same reason
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        instead = self._instead.get(func)
        if instead and any(isinstance(one, FakeTensor) for one in args[:2]):
            return instead(*args, **kwargs)
        if func is _Tensor.item and isinstance(args[0], DTensor):  # of which a part may be known
            func = self._of_shard
        if func in (_Tensor.cuda, _Tensor.pin_memory):
            return self._instead[func](*args, **kwargs)
        if func is torch.device:
            return func(*args, **kwargs)
        for value in args:
            if type(value) in (str, torch.device):
                args = tuple(map(ours, args))
                break
        if (device := kwargs.get("device")) is not None:
            kwargs = {**kwargs, "device": (place := ours(device))}
            if func in _OF_DATA and is_ours(place):
                args = self._numbers(args[0]), *args[1:]
                return func(*args, **{**kwargs, "device": "cpu"}).to(place)
        return func(*args, **kwargs)

    def _item(self, tensor: torch.Tensor) -> Any:
        values = values_of(tensor)
        if values is None and tensor.dtype is not torch.bool:
            return UnknownNumber(self._assumed)
        return self._watch.value(tensor) if values is None else values.item()

    def _of_shard(self, tensor: DTensor) -> Any:
        known = values_of(tensor.to_local()) is not None
        return _Tensor.item(tensor) if known else UnknownNumber(self._assumed)

    def _list(self, tensor: torch.Tensor) -> Any:
        values = values_of(tensor, self._assumed if tensor.dim() else None)
        if values is not None:
            return values.tolist()
        if not tensor.dim():
            return self._item(tensor)
        return [self._list(one) for one in tensor.detach()]

    def _numbers(self, data: Any) -> Any:
        """Data of which a tensor is made, and in which there may be tensors of the device."""
        if type(data) in (list, tuple):
            return [self._numbers(one) for one in data]
        return self._list(data) if type(data) is FakeTensor and not data.dim() else data

    def _number(self, kind: type) -> Callable[..., Any]:
        def number(tensor: torch.Tensor, *_: Any) -> Any:
            return kind(self._watch.value(tensor))

        return number

    def _array(self, tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        values = values_of(tensor)
        if (
            values is None and not torch.is_grad_enabled()
        ):  # an evaluation's, which take no memory here
            values = torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
        elif values is None:
            value = self._assumed.value("the values of a tensor (numpy)")  # one for all
            values = torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")
        return torch.as_tensor(values).numpy(*arguments, **options)

    def _finite(self, func: Any, known: bool) -> Callable[..., Any]:
        """Weights that are not there are those of a run in which nothing overflows."""

        def answer(tensor: torch.Tensor) -> torch.Tensor:
            result = func(tensor)
            note(result, torch.full(result.shape, known, dtype=torch.bool))
            return result

        return answer


def _indexing(func: Any) -> Callable[..., Any]:
    """``func`` with lists of numbers as indices, which torch copies to the device where no mode sees it."""

    def copied(index: Any, device: torch.device) -> Any:
        if type(index) is not list or not all(isinstance(one, int) for one in index):
            return index
        return torch.tensor(index, dtype=None if index else torch.int64).to(device)

    def indexed(tensor: torch.Tensor, index: Any, *value: Any) -> Any:
        device = tensor.device
        if type(index) is tuple:
            return func(tensor, tuple(copied(one, device) for one in index), *value)
        return func(tensor, copied(index, device), *value)

    return indexed


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or what it is made of, is on the fake device."""
    if isinstance(tensor, FakeTensor):
        return device_of(tensor).type == fake_device.NAME
    return isinstance(tensor, DTensor) and is_on_device(tensor.to_local())


def is_planned(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake, on the device or, perhaps between two uses there, on the host."""
    return isinstance(tensor, FakeTensor) or (
        isinstance(tensor, DTensor) and is_planned(tensor.to_local())
    )


def _seen(tensor: FakeTensor) -> torch.device:
    """The device that whoever asks sees: torch the fake one, and all others ``cuda:0``."""
    device = device_of(tensor)
    if device.type == fake_device.NAME:
        # Not the frame itself, which would hold itself, and all its callers hold, until cycles are collected.
        caller = inspect.currentframe().f_back  # type: ignore[union-attr]
        asks = f"{caller.f_globals.get('__name__', '')}."  # type: ignore[union-attr]
        inside = asks.startswith(("torch.", "torchtune_adaptive.planner."))
        if caller.f_code.co_filename == "<string>":  # type: ignore[union-attr]
            # A method of torch's, perhaps, whose text somebody has changed.
            owner = type(caller.f_locals.get("self"))  # type: ignore[union-attr]
            inside = inside or owner.__module__.startswith("torch.")
        if not inside and calls_are_seen():  # by ``Face``, which takes it for the fake one
            return _CUDA
    return device


class _Properties(SimpleNamespace):
    """What a program is told of its GPU."""

    are_counted = False
    """Whether it has asked for the number of multiprocessors, by which some kernels allocate."""

    @property
    def multi_processor_count(self) -> int:
        self.are_counted = True
        return int(self.processors)


def show(gpu: Gpu, devices: int, recorder: Recorder) -> _Properties:
    """Let ``torch.cuda`` speak of so many devices of this kind from now on, in all of this process; what it
    tells of them."""
    major, minor = gpu.capability
    speeds = SPEEDS[gpu.name]
    properties = _Properties(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.total,
        processors=speeds.processors,
        warp_size=32,
        max_threads_per_multi_processor=_THREADS.get(gpu.capability, 2048),
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        L2_cache_size=int(speeds.cache),
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        uuid="GPU-0",
    )
    let_see(_seen)
    have_parts_of_cuda()
    put(torch.version, "cuda", _CUDA_VERSION)
    cuda = torch.cuda
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": major >= 8,
        "can_device_access_peer": True,
        "device_count": devices,
        "current_device": 0,
        "get_device_name": gpu.name,
        "get_device_capability": (major, minor),
        "get_device_properties": properties,
        "get_arch_list": [f"sm_{major}{minor}"],
        **dict.fromkeys(("init", "set_device", "empty_cache", "ipc_collect")),
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all")),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated")),
        **dict.fromkeys(("set_rng_state", "set_rng_state_all", "set_per_process_memory_fraction")),
    }
    functions = {name: lambda *_, answer=answer, **__: answer for name, answer in answers.items()}
    for name in ("memory_allocated", "memory_reserved"):
        functions[name] = lambda *_, **__: recorder.in_use
        functions[f"max_{name}"] = lambda *_, **__: recorder.peak
    functions["memory_summary"] = lambda *_, **__: (
        f"{recorder.in_use} bytes, at most {recorder.peak}"
    )
    functions["memory_stats"] = lambda *_, **__: _statistics(recorder)
    functions["synchronize"] = lambda *_, **__: fake_device.current_stream().synchronize()
    functions["mem_get_info"] = lambda *_, **__: (gpu.total - recorder.in_use, gpu.total)
    for name, function in functions.items():
        for owner in (cuda, cuda.memory):
            if hasattr(owner, name):
                put(owner, name, function)
    put(cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8))
    put(cuda, "get_rng_state_all", lambda *_: [])
    for name in ("device", "device_of"):
        put(cuda, name, _Guard)
    put(torch, "Generator", _Generator)
    put(_Tensor, "record_stream", lambda *_: None)  # would delay a release until a stream is done
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        put(cuda.nvtx, name, lambda *_: 0)
    put(cuda, "Stream", fake_device.FakeStream)
    put(cuda, "Event", fake_device.FakeEvent)
    put(cuda, "current_stream", fake_device.current_stream)
    put(cuda, "default_stream", fake_device.default_stream)
    put(cuda, "stream", fake_device.in_stream)
    put(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    put(torch.accelerator, "is_available", lambda: True)
    put(torch.accelerator, "device_count", lambda: devices)
    put(torch.accelerator, "set_device_index", lambda *_: None)
    return properties


class _Guard(nullcontext[None]):
    """A context in which a device is the current one."""

    def __init__(self, device: Any) -> None:
        super().__init__()


class _Generator(torch.Generator):
    """A generator for a device, of which nothing is drawn there."""

    device: torch.device = torch.device("cpu")

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made = super().__new__(cls, "cpu" if is_cuda(device) else device)  # type: ignore[call-arg]
        made.device = _CUDA if is_cuda(device) else torch.device(device)
        return made


def _statistics(recorder: Recorder) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for name in ("allocated", "active", "reserved", "requested"):
        found[f"{name}_bytes.all.current"] = recorder.in_use
        found[f"{name}_bytes.all.peak"] = recorder.peak
    return found
