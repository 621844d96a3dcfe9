"""Results of operations on fake tensors, each computed once.

A model repeats its layers, so most operations of a step have had the same arguments before, as far as
shapes, strides, types and devices go, and nothing else decides what fake tensors result. ``FakeTensorMode``
has a cache for that as well, but takes most of its time to look things up in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchtune_adaptive.planner.private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    is_same,
    schema_of,
    without_dispatch,
)

_DEPENDS_ON_VALUES = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
_CHANGES_ITS_ARGUMENT = frozenset(("aten::resize_", "aten::resize_as_", "aten::set_"))
"""Operations that change its shape or storage; others have a tag."""
_TORCHS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = frozenset((int, float, bool, str, type(None), *_TORCHS))
_ON_META = frozenset((torch.Tensor, torch.nn.Parameter))


class MadeTensor(NamedTuple):
    """A tensor of a result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    view_of: int | None
    """Number of the tensor among the arguments whose storage it shares; None if it has its own."""


class _Given(NamedTuple):
    """A tensor among the arguments, itself."""

    number: int


class _Constant(NamedTuple):
    value: Any


_Part = MadeTensor | _Given | _Constant


class KnownResults:
    """Calls operations, and makes results that are known without calling them; ``mode``, that of all tensors,
    computes the others."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._regular: dict[Any, bool] = {}
        self._known: dict[Any, tuple[Callable[..., Any] | None, list[_Part]] | None] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``func(*args, **kwargs)``."""
        regular = self._regular.get(func)
        if regular is None:
            regular = self._regular[func] = _is_regular(func)
        if not regular:
            return self._computed(func, args, kwargs)
        tensors: list[FakeTensor] = []
        facts: list[Any] = [func, torch.get_default_dtype()]
        if not self._describe((args, *kwargs.items()), facts, tensors):
            return self._computed(func, args, kwargs)
        key = tuple(facts)
        if key not in self._known:
            result = self._computed(func, args, kwargs)
            self._known[key] = _taken_apart(result, tensors)
            return result
        known = self._known[key]
        if known is None:
            return self._computed(func, args, kwargs)
        collect, parts = known
        made = [self.make(part, tensors) for part in parts]
        return made[0] if collect is None else collect(made)

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._mode:  # which programs do not run in
            return func(*args, **kwargs)

    def _describe(self, values: Any, facts: list[Any], tensors: list[FakeTensor]) -> bool:
        """Add what decides the result to ``facts``; False if these arguments are not regular."""
        for value in values:
            kind = type(value)
            if kind in _ON_META and value.is_meta:  # a parameter before it is sharded
                value, kind = self._mode.from_tensor(value), FakeTensor
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not self._mode:
                    return False
                if value.is_conj() or value.is_neg():
                    return False
                tensors.append(value)
                layout = (value.shape, value.stride(), value.storage_offset())
                facts.append((*layout, value.dtype, value.fake_device))
            elif kind in _PLAIN:
                facts.append(kind)  # 1, 1.0 and True are equal
                facts.append(value)
            elif kind is list or kind is tuple or kind is torch.Size:
                facts.append(len(value))
                if not self._describe(value, facts, tensors):
                    return False
            else:
                return False
        return True

    @staticmethod
    def layout(tensor: torch.Tensor) -> MadeTensor | None:
        """The tensor to ``make`` again; None if it is only a part of its storage, or is not regular."""
        part = _part(tensor, [])
        return part if isinstance(part, MadeTensor) else None

    def make(self, part: _Part, tensors: Sequence[FakeTensor] = ()) -> Any:
        """A part of a result, whose arguments had these tensors."""
        if isinstance(part, _Constant):
            return part.value
        if isinstance(part, _Given):
            return tensors[part.number]
        with without_dispatch():
            if part.view_of is None:
                shape, stride, dtype = part.shape, part.stride, part.dtype
                plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                storage = tensors[part.view_of].untyped_storage()
                plain = torch.empty(0, dtype=part.dtype, device="meta")
                plain.set_(storage, part.offset, part.shape, part.stride)
        return FakeTensor(self._mode, plain, part.device)


def _is_regular(func: Any) -> bool:
    """Whether only the kinds of its arguments decide what results, and they stay as they are."""
    return (
        isinstance(func, OpOverload)
        and func.namespace in ("aten", "fsdp")
        and not _DEPENDS_ON_VALUES & set(func.tags)
        and torch.Tag.inplace_view not in func.tags
        and schema_of(func).name not in _CHANGES_ITS_ARGUMENT
    )


def _taken_apart(
    result: Any, tensors: list[FakeTensor]
) -> tuple[Callable[..., Any] | None, list[_Part]] | None:
    """The parts from which a result can be made again; None if it is not a regular one."""
    several = type(result) in (tuple, list)
    parts = [_part(value, tensors) for value in (result if several else [result])]
    if None in parts:
        return None
    return type(result) if several else None, [part for part in parts if part is not None]


def _part(value: Any, tensors: list[FakeTensor]) -> _Part | None:
    if type(value) in _PLAIN:
        return _Constant(value)
    if type(value) is not FakeTensor or value.constant is not None:
        return None
    storage = value.untyped_storage()
    for number, given in enumerate(tensors):
        if value is given:
            return _Given(number)
    layout = (tuple(value.shape), value.stride(), int(value.storage_offset()))
    made = MadeTensor(*layout, value.dtype, value.fake_device, None)
    for number, given in enumerate(tensors):
        if is_same(storage, given.untyped_storage()):
            return made._replace(view_of=number)
    extent = 1 + sum((n - 1) * step for n, step in zip(made.shape, made.stride, strict=True))
    nbytes = extent * value.element_size() if value.numel() else 0
    return made if made.offset == 0 and storage.nbytes() == nbytes else None
