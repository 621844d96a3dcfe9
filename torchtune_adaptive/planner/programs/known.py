"""Operations of a program: those on the fake device are recorded, and what follows from data has its value.

What a program computes on the host is computed. A tensor on the device has no values, but where it was made
of a batch, a mask or the numbers of positions, say, its values are computed beside it, on the host. So
whatever depends on data alone happens as it would on a GPU: which tokens have a label, or whether rows have
padding.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from torchtune_adaptive.planner.private import (
    FakeTensor,
    FakeTensorMode,
    is_same,
    schema_of,
    tree_map_only,
)
from torchtune_adaptive.planner.programs import registered
from torchtune_adaptive.planner.programs.private import parts_of
from torchtune_adaptive.planner.programs.unknown import Assumed, place_of_caller
from torchtune_adaptive.planner.trace import fake_device
from torchtune_adaptive.planner.trace.recorder import Recorder, Watch

_aten = torch.ops.aten
_MOST_INTEGERS, _MOST_FLOATS, _MOST_OF_DATA = 1 << 26, 1 << 12, 1 << 24
"""The elements that a tensor may have whose values are computed; more floats, such as images, where they
follow from data, and are no weights, nor what an optimizer has for these."""
_TO, _SCALAR = _aten._to_copy.default, _aten._local_scalar_dense.default
_VIEW = _aten.view.default
_LIKE = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}
"""Operations whose result does not depend on the values of what they are given."""
_VALUES_DECIDE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_CHOICE, _WORST = _aten.topk.default, "worst"
_SCALER = _aten._amp_foreach_non_finite_check_and_unscale_.default
"""Notes whether a gradient has overflowed: in what is planned, none does."""
_PUT = _aten.index_put_.default
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _PUT, _aten._unsafe_index.Tensor}
_PLAIN = {torch.Tensor, torch.nn.Parameter}
"""Kinds of tensors that are not made of others, besides fake ones."""


class _KnownValues:
    """The values of a tensor, until something is written there that is not known."""

    __slots__ = ("choice", "lost", "values")

    def __init__(
        self,
        values: torch.Tensor,
        lost: list[bool] | None = None,
        choice: tuple[str, str] | None = None,
    ) -> None:
        self.values, self.choice = values, choice
        """What they are, and where a choice was made that they follow from, and how."""
        self.lost = [False] if lost is None else lost
        """Whether they are known no more, for all tensors that share the memory."""

    def say(self, assumed: Assumed) -> None:
        """Note that they decide what happens, if they follow from a choice."""
        if self.choice:
            assumed.choices.update([self.choice])


class _Facts(NamedTuple):
    """What is to be known about an operation, looked up once."""

    writes: tuple[tuple[int, str], ...]
    """Arguments that are changed: position, name."""
    computable: bool
    """Whether the same arguments always give the same values."""
    values_decide: bool
    """Whether values decide the shape of the result, or are the result."""
    like: int | None
    kernel: Any
    """What does it by others: a library's kernel in Python, or torch where autograd has not before."""

    def forget(self, args: Any, kwargs: Any) -> None:
        """Forget the values of arguments that are changed."""
        for at, name in self.writes:
            forget(kwargs.get(name, args[at] if at < len(args) else None))


class ProgramWatch(Watch):
    """Sees all operations of a program; ``assumed`` has values that the user gives."""

    def __init__(self, recorder: Recorder, mode: FakeTensorMode, assumed: Assumed) -> None:
        super().__init__(recorder, mode)
        self._mode, self._assumed = mode, assumed
        self._known_facts: dict[Any, _Facts] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if any(not issubclass(kind, FakeTensor) and kind not in _PLAIN for kind in types):
            return NotImplemented  # a sharded tensor, say: its plain parts come next
        if is_cuda(kwargs.get("device")):  # of a function of torch that asks for a tensor's device
            kwargs["device"] = fake_device.device()
        if kwargs.pop("pin_memory", False):  # memory of the host that the device copies to, or from
            with self._mode:
                return func(*args, **kwargs)
        if not (FakeTensor in types or any(map(_is_fake, types)) or is_ours(kwargs.get("device"))):
            return func(*args, **kwargs)
        if func is _SCALAR:
            if self._recorder.log is not None:
                self._recorder.log.read_by_host(args[0])
            return self.value(args[0])
        facts = self._known_facts.get(func)
        if facts is None:
            facts = self._known_facts[func] = _facts(func)
        if facts.kernel is not None:
            return self._by_others(facts, args, kwargs)
        if func is _TO and not isinstance(args[0], FakeTensor):
            return self._from_host(*args, **kwargs)
        if func is _PUT and _is_fill(*args):
            tensor, mask = args[0], args[1][0]
            for _ in range(tensor.dim() - mask.dim()):
                mask = self.__torch_dispatch__(_aten.unsqueeze.default, types, (mask, -1))
            filled = tensor, mask, args[2]
            return self.__torch_dispatch__(_aten.masked_fill_.Tensor, types, filled)
        if func in _INDEXED:
            args = self._with_numbers(args)
        elif facts.values_decide:
            return self._decided(func, args, kwargs)
        given = self._given(args, kwargs) if facts.computable else None
        if given is not None and (to := kwargs.get("device")) is not None and not is_ours(to):
            self._say(given)
            if self._recorder.log is not None:
                self._recorder.log.read_by_host(args[0])
            return func(*given.args, **given.kwargs)  # to the host
        impossible = ""
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except ValueError as error:
            if func is not _VIEW:
                raise
            impossible = str(error)
        if impossible:  # as on a GPU, and without the other error, which holds its frames
            raise RuntimeError(impossible)
        if given is not None and _is_small(result, _MOST_OF_DATA if given.known else _MOST_FLOATS):
            self._note(result, given, func)
        elif func is _CHOICE and _is_small(result[1]):
            self._choose(result[1], args[0])
        elif facts.like is not None and _is_small(result):
            result.known = _KnownValues(torch.full(result.shape, facts.like, dtype=result.dtype))
        else:
            facts.forget(args, kwargs)
        return result

    def _by_others(self, facts: _Facts, args: Any, kwargs: Any) -> Any:
        """The result of an operation by others, each of which is seen."""
        facts.forget(args, kwargs)
        with self:
            return facts.kernel(*args, **kwargs)

    def value(self, tensor: torch.Tensor, what: str = "the value of a tensor") -> Any:
        """The value of a tensor of one element, which is known or assumed.

        Raises:
            NoPrediction: it is neither.
        """
        values = values_of(tensor)
        return self._assumed.value(what) if values is None else values.item()

    def _given(self, args: Any, kwargs: Any) -> _KnownArguments | None:
        """Arguments with values; None if some are not known."""
        known: list[_KnownValues] = []
        try:
            found = (
                _with_values(args, known),
                {name: _with_values(one, known) for name, one in kwargs.items()},
            )
        except _NotKnown:
            return None
        if is_ours(found[1].get("device")):
            found[1]["device"] = "cpu"
        return _KnownArguments(*found, known)

    def _note(self, result: Any, given: _KnownArguments, func: Any) -> None:
        """Compute and note the values of what has resulted from known arguments."""
        try:
            values = func(*given.args, **given.kwargs)
        except NotImplementedError:  # but for CUDA
            return
        several = isinstance(result, (tuple, list))
        for one, its in zip(result, values, strict=True) if several else [(result, values)]:
            if type(one) is FakeTensor and getattr(one, "known", None) is None:
                storage = its.untyped_storage()
                shared = (
                    known.lost
                    for known in given.known
                    if is_same(storage, known.values.untyped_storage())
                )
                choice = next((known.choice for known in given.known if known.choice), None)
                one.known = _KnownValues(its, next(shared, None), choice)  # type: ignore[attr-defined]

    def _choose(self, numbers: torch.Tensor, scores: torch.Tensor) -> None:
        """Let what a router, say, chooses by scores that nobody knows be chosen as often as all others; or,
        if the user says so, be the same everywhere."""
        place, count = place_of_caller(), numbers.shape[-1:].numel()
        worst = self._assumed.given(place) == _WORST
        values = torch.arange(numbers.numel()) % (count if worst else scores.shape[-1])
        other = f"--assume {place.rpartition('/')[2]}={_WORST}"
        how = "the same each time" if worst else f"all as often ({other}: the same each time)"
        numbers.known = _KnownValues(values.view(numbers.shape), None, (place, how))  # type: ignore

    def _say(self, given: _KnownArguments) -> None:
        """Note what is decided by choices of which nobody knows."""
        for known in given.known:
            known.say(self._assumed)

    def _with_numbers(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of an operation with indices: a mask among them becomes the numbers of what it selects,
        as CUDA does."""
        indices: list[Any] = []
        for one in args[1]:
            is_mask = isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8)
            if is_mask and FakeTensor in (type(one), type(args[0])):
                numbers = self._decided(_aten.nonzero.default, (one,), {})
                unbound = _aten.unbind.int
                indices += self.__torch_dispatch__(unbound, (FakeTensor,), (numbers, 1))
            else:
                indices.append(one)
        return args[0], indices, *args[2:]

    def _decided(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation whose values decide."""
        given = self._given(args, kwargs)
        if given is None:
            if schema_of(func).returns[0].type.kind() != "TensorType":
                return self._assumed.value(f"the result of {func.overloadpacket.__name__}")
            self._assumed.value(f"the values of a tensor ({func.overloadpacket.__name__})")
            raise AssertionError
        self._say(given)
        if self._recorder.log is not None:
            self._recorder.log.read_by_host(args[0])
        values = func(*given.args, **given.kwargs)
        return tree_map_only(torch.Tensor, lambda one: self._on_device(one, one), values)

    def _from_host(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        """The copy on the device of a tensor on the host."""
        values: torch.Tensor | None = None
        weight = isinstance(tensor, torch.nn.Parameter)
        if _is_small(tensor, _MOST_FLOATS if weight else _MOST_OF_DATA):
            values = _TO(tensor, **{**options, "device": "cpu"})
            if tensor.is_floating_point() and bool(tensor.isnan().any()):  # as unknown numbers are
                values = None
        like = tensor.to(device="meta", dtype=options.get("dtype"))
        return self._on_device(like if values is None else values, values)

    def _on_device(self, like: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
        """A tensor on the device, with these values if they are known."""
        layout = {"dtype": like.dtype, "device": fake_device.device()}
        made: torch.Tensor = super().__torch_dispatch__(
            _aten.empty_strided.default, (), (like.shape, like.stride()), layout
        )
        if values is not None:
            note(made, values)
        return made


def is_cuda(device: Any) -> bool:
    """Whether a device, or its name, is that of a GPU as programs have it."""
    if type(device) is str:
        return device == "cuda" or device.startswith("cuda:")
    return type(device) is torch.device and device.type == "cuda"


def _is_fake(kind: type) -> bool:
    return issubclass(kind, FakeTensor)


def is_ours(device: Any) -> bool:
    """Whether a device is the fake one."""
    return device is not None and torch.device(device).type == fake_device.NAME


def note(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Note the values of a tensor on the device."""
    tensor.known = _KnownValues(values)  # type: ignore[attr-defined]


def values_of(tensor: torch.Tensor, decides: Assumed | None = None) -> torch.Tensor | None:
    """The values of a tensor; None if they are not known. Those that follow from a choice are known to what
    decides by them, where that is noted."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    known = _known(tensor)
    if known is None or (known.choice and decides is None):
        return None
    if decides is not None:
        known.say(decides)
    return known.values


def _known(tensor: torch.Tensor) -> _KnownValues | None:
    """What is known of a tensor's values, unless it has others of another type by now, as its ``data``."""
    known: _KnownValues | None = getattr(tensor, "known", None)
    if known is None or known.lost[0] or known.values.dtype is not tensor.dtype:
        return None
    return known


class _NotKnown(Exception):
    """An argument that has no values."""


class _KnownArguments(NamedTuple):
    """The arguments of an operation with values in the place of tensors without."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    known: list[_KnownValues]


def _with_values(value: Any, known: list[_KnownValues]) -> Any:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, FakeTensor):
            return value
        its = _known(value)
        if its is None:
            raise _NotKnown
        known.append(its)
        return known[-1].values
    if type(value) in (list, tuple):
        return type(value)(_with_values(one, known) for one in value)
    return value


def _is_fill(tensor: Any, indices: Any, value: Any, accumulates: bool = False) -> bool:
    """Whether ``index_put_`` fills where a mask is set, as CUDA does without asking how often it is."""
    if accumulates or len(indices) != 1 or value.dim():
        return False
    mask = indices[0]
    return mask.dtype == torch.bool and mask.shape == tensor.shape[: mask.dim()]


def _facts(func: Any) -> _Facts:
    schema = schema_of(func)
    writes = tuple(
        (at, one.name)
        for at, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
        if func is not _SCALER or one.name == "self"
    )
    name = schema.name.split("::")[1]
    tags = set(func.tags)
    computable = (
        func.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in tags
        and not name.startswith(("empty", "new_empty", "rand", "_foreach", "_fused"))
    )
    like = _LIKE.get(name)
    decide = bool(_VALUES_DECIDE & tags)
    kernel = parts_of(func) if func.namespace == "aten" else registered.kernel_of(func.name())
    return _Facts(writes, computable, decide, like, kernel)


def _is_small(result: Any, floats: int = _MOST_FLOATS) -> bool:
    """Whether the values of a result are worth being computed, if they are so many floats at most."""
    if isinstance(result, (tuple, list)):
        return bool(result) and all(_is_small(one, floats) for one in result)
    if not isinstance(result, torch.Tensor):
        return False
    are_floats = result.dtype.is_floating_point or result.dtype.is_complex
    return prod(result.shape) <= (floats if are_floats else _MOST_INTEGERS)


def forget(value: Any) -> None:
    """Forget the values of what has been written."""
    if type(value) is FakeTensor:
        known: _KnownValues | None = getattr(value, "known", None)
        if known is not None:
            known.lost[0] = True
    elif type(value) in (list, tuple):
        for one in value:
            forget(one)
