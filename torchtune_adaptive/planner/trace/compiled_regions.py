"""The regions of a traced step that ``torch.compile`` compiles, with the memory that they take on a GPU.

What a compiled region keeps for backward, allocates, reuses and releases is decided by AOTAutograd, its
partitioner and inductor, from shapes alone. So they decide it here as well: a region is compiled for the fake
device as for a GPU, and inductor's code for it runs on fake tensors, with kernels that do nothing.

A function that cannot be compiled here runs as it is written, which takes more memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtune_adaptive.planner.private import (
    FakeTensorMode,
    compiled_for,
    is_traceable_wrapper_subclass,
    tree_flatten,
    tree_unflatten,
    with_tensors,
    without_modes,
)
from torchtune_adaptive.planner.trace.recorder import Recorder, Watch

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class CompiledRegions:
    """Functions as compiled. Those that are alike, such as the layers of a model, are compiled once."""

    def __init__(self, device: torch.device, mode: FakeTensorMode) -> None:
        self._device, self._mode = device, mode
        self.known: dict[Any, Callable[..., Any] | None] = {}
        """What is compiled, by what decides how it is; None where it cannot be."""
        self.following = True
        """Whether regions are compiled; if not, they run as they are written."""
        self.failed = ""
        """The reason why a function runs as it is written; empty if none does."""

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """A context in which nothing is compiled."""
        before, self.following = self.following, False
        try:
            yield
        finally:
            self.following = before

    def region(
        self, function: Callable[..., Any], module: nn.Module | None = None, name: str = ""
    ) -> Callable[..., Any]:
        """What ``torch.compile`` gives for a function that uses the parameters of a module, by default of the
        one that it is a method of. Functions that do the same with modules that are alike share a name."""
        owner: Any = module if module is not None else getattr(function, "__self__", None)
        what: Any = name or getattr(function, "__func__", function)
        kinds: list[Any] = []

        def run(*arguments: Any, **named: Any) -> Any:
            if not self.following:
                return function(*arguments, **named)
            if not kinds:
                kinds.extend((what, _kind_of(owner)))
            own = _tensors_of(owner)
            values, structure = tree_flatten((arguments, named))
            given = [*own.values(), *values]
            key = (*kinds, *own, structure, torch.is_grad_enabled(), *map(_facts, given))
            if key not in self.known:
                call = _OfTensors(function, owner, list(own), values, structure)
                self.known[key] = self._compiled(call, given)
            compiled = self.known[key]
            if compiled is None:
                return function(*arguments, **named)
            return compiled(*(t for t in given if isinstance(t, torch.Tensor)))

        return run

    def _compiled(self, call: _OfTensors, given: list[Any]) -> Callable[..., Any] | None:
        try:
            with without_modes(), self._mode, self.as_written():
                examples = [_like(t) for t in given if isinstance(t, torch.Tensor)]
                load = partial(_loaded, self._device)
                compiled = compiled_for(self._device, self._mode, call, examples, load)
        except Exception as error:
            self.failed = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            return None
        return lambda *tensors: tree_unflatten(compiled(*tensors), call.result)


class _OfTensors:
    """A function of tensors alone, those of a module before its arguments, which gives a tuple.

    It keeps no tensor that it is made from, since they live as long as the step has them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        module: nn.Module | None,
        names: list[str],
        values: list[Any],
        structure: Any,
    ) -> None:
        self._function, self._module, self._names = function, module, names
        self._values = [_Argument if isinstance(v, torch.Tensor) else v for v in values]
        self._structure = structure
        self.result: Any = None
        """The structure of what it gives, after the first call."""

    def __call__(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        own = dict(zip(self._names, tensors, strict=False))
        rest = iter(tensors[len(own) :])
        values = [next(rest) if value is _Argument else value for value in self._values]
        arguments, named = tree_unflatten(values, self._structure)
        with with_tensors(self._module, own) if self._module is not None else nullcontext():
            result = self._function(*arguments, **named)
        leaves, self.result = tree_flatten(result)
        return tuple(leaves)


class _Argument:
    """Stands for a tensor among the arguments."""


def _tensors_of(module: nn.Module | None) -> dict[str, torch.Tensor]:
    if module is None:
        return {}
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _kind_of(module: nn.Module | None) -> Any:
    """What modules that do the same have in common, but for their tensors."""
    parts = module.modules() if module is not None else ()
    return tuple(
        (type(part), *((k, v) for k, v in vars(part).items() if isinstance(v, _PLAIN)))
        for part in parts
    )


def _facts(value: Any) -> Any:
    """What decides how a function of a value is compiled."""
    if isinstance(value, torch.Tensor):
        layout = (value.shape, value.stride(), value.dtype, value.device)
        return (type(value), *layout, value.requires_grad)
    return (type(value), value if isinstance(value, _PLAIN) else id(value))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    if is_traceable_wrapper_subclass(tensor):  # quantized
        return tensor.detach().requires_grad_(tensor.requires_grad)
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return made.requires_grad_(tensor.requires_grad)


# --- self-check ---------------------------------------------------------------------------------

_TOKENS, _WIDTH, _INNER = 96, 32, 64
_EXPECTED = (3 * 2 * _TOKENS * _INNER, 65536)
"""Bytes that the small region keeps: two products, and what the third one reads; and the most it takes."""


def check_compiler(device: torch.device, backend: str) -> str:
    """Check that a small region takes as much memory as is known of inductor, with the installed torch. The
    result is the reason why what is compiled with a backend cannot be followed; empty if it can."""
    if backend != "inductor":
        return f"its backend is {backend}"
    mode = FakeTensorMode()
    recorder = Recorder(device)
    regions = CompiledRegions(device, mode)
    region = regions.region(_small_region)
    with mode, Watch(recorder, mode):
        shapes = ((_TOKENS, _WIDTH), (_WIDTH, _INNER), (_WIDTH, _INNER), (_INNER, _WIDTH))
        given = [
            torch.empty(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
            for shape in shapes
        ]
        before = recorder.in_use
        result = region(*given)
        kept = recorder.in_use - before - result.nbytes
        recorder.peak = recorder.in_use
        result.backward(torch.empty_like(result))
        most = recorder.peak - before
    if regions.failed or (kept, most) == _EXPECTED:
        return regions.failed
    return f"a small region keeps and takes {(kept, most)} bytes instead of {_EXPECTED}"


def _small_region(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    return x + (F.silu(x @ gate) * (x @ up)) @ down


# --- inductor's code ------------------------------------------------------------------------------

_LEFT_OUT = (
    "import triton",
    "from torch._inductor.runtime.triton",
    "async_compile",
    "del async_compile",
    "empty_strided_p2p",
)
"""Beginnings of lines that need triton, or an allocator of a device."""


class _Kernel:
    """A kernel. It writes into what has been allocated before, so here it does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _loaded(device: torch.device, code: str) -> Callable[[list[Any]], Any]:
    """The function that inductor's code defines, for fake tensors."""
    for end in ("\ndef get_args", "\ndef benchmark"):
        code = code.partition(end)[0]
    lines = (line for line in code.split("\n") if not line.startswith(_LEFT_OUT))
    code = "\n".join(lines).replace(f"device='{device.type}'", f"device='{device}'")
    names: dict[str, Any] = {"nullcontext": nullcontext}
    exec(compile(code, "<inductor>", "exec"), names)
    names.update(dict.fromkeys(re.findall(r"\bkernel_\d+\b", code), _Kernel()))
    names.update(
        extern_kernels=_Kernel(),
        assert_size_stride=lambda *_: None,
        assert_alignment=lambda *_: None,
        copy_if_misaligned=lambda tensor: tensor,
        reinterpret_tensor=_reinterpreted,
    )
    call: Callable[[list[Any]], Any] = names["call"]
    return call


def _reinterpreted(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, offset + tensor.storage_offset())
