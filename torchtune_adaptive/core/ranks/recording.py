"""Launches of collectives, whoever makes them, in enough detail to make them again on buffers of no worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from torchtune_adaptive.core.private import (
    FakeTensor,
    HigherOrderOperator,
    TorchDispatchMode,
    call_inside,
    group_in,
    group_named,
    schema_of,
    tree_leaves,
    tree_map_only,
)

_ALIGNMENT = 512  # bytes; allocators align the start of a buffer like this
_NAMESPACES = {"c10d", "_c10d_functional", "_dtensor"}
_LAUNCH_NOTHING = {"aten", "prims", "prim", "profiler"}
_NO_LAUNCHES = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}
_IN_PLACE = {"allreduce_", "allreduce_coalesced_", "all_reduce_", "all_reduce_coalesced_"}
_ALL_TO_ALL = {"alltoall_base_", "all_to_all_single"}
_ONE_SIDED = {"symm_mem", "deepep", "hybridep"}
"""Operators that reach into the memory of other ranks: torch's, and DeepEP's as torchtitan names them."""
_POINT_TO_POINT = {"send", "recv_", "recv_any_source_", "isend", "irecv", "batch_p2p_ops"}


@dataclass(frozen=True)
class _Buffer:
    """A tensor that a collective was given, without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        size = self.shape.numel() * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Launch:
    """An operator that launches a collective, and its arguments, with buffers in the place of tensors."""

    operator: Any = field(compare=False)
    arguments: tuple[Any, Any] = field(compare=False)
    group: dist.ProcessGroup = field(compare=False)
    key: tuple[Any, ...]
    """What two launches are compared by."""
    of_fsdp: bool = False
    """Whether one of FSDP's hooks for collectives makes it, or one that reduces replicas."""
    follows_data: bool = False
    """Whether its sizes may be others for other data of the same shape: an all-to-all that is told the sizes
    of its parts. In a rotation, which sends one part and gets one, there is nothing to choose."""
    told_sizes: bool = False
    """Whether it is an all-to-all that is told the sizes of its parts, whatever they are."""
    refused: str = ""
    """The reason why a rank cannot make it by itself, or cannot tell whether it has been made."""
    any_size: bool = False
    """Whether it may have other sizes each time, so that it is compared by its group alone."""
    tells: bool = False
    """Whether it shows where a rank has failed: with zeros in the place of its values."""

    @property
    def bytes(self) -> int:
        return sum(leaf.bytes for leaf in tree_leaves(self.arguments) if isinstance(leaf, _Buffer))

    def of_any_size(self) -> Launch:
        """The same launch, which may have other sizes the next time."""
        return replace(self, key=(self.group.group_name,), any_size=True, follows_data=False)

    def again(self, scratch: torch.Tensor) -> None:
        """Launch it on parts of a buffer, and wait for it."""
        taken = 0

        def part(buffer: _Buffer) -> torch.Tensor:
            nonlocal taken
            if buffer.device.type != scratch.device.type:  # on the host, which has its own memory
                return torch.zeros(buffer.shape, dtype=buffer.dtype, device=buffer.device)
            start, taken = taken, taken + buffer.bytes
            plain = scratch[start:taken].view(buffer.dtype)
            return plain[: buffer.shape.numel()].view(buffer.shape)

        positional, named = tree_map_only(_Buffer, part, self.arguments)
        for leaf in tree_leaves(self.operator(*positional, **named)):
            if isinstance(leaf, torch.ScriptObject):
                dist.Work.unbox(leaf).wait()
            elif isinstance(leaf, torch.Tensor):
                # Of a functional collective; of another, there is nothing to wait for.
                torch.ops._c10d_functional.wait_tensor(leaf)


def launch_of(call: partial[Any]) -> Launch:
    """What a call of one of torch's functions for collectives launches, given its ``group`` by name."""
    named = {**call.keywords, "async_op": False}
    arguments = _without_values((call.args, named))
    key = (call.func.__name__, *tree_leaves(arguments))
    return Launch(call.func, arguments, named["group"], key)


def gather_of(tensor: torch.Tensor) -> Launch:
    """The launch that gathers a tensor from all ranks, as libraries write it: gloo takes a list."""
    row, ranks = tensor.detach().reshape(-1), dist.get_world_size()
    if dist.get_backend() == dist.Backend.GLOO:
        call = partial(dist.all_gather, [row] * ranks, row, group=dist.group.WORLD)
    else:
        rows = row.expand(ranks, -1)
        call = partial(dist.all_gather_into_tensor, rows, row, group=dist.group.WORLD)
    return launch_of(call)


def _without_values(arguments: Any) -> Any:
    return tree_map_only(
        torch.Tensor, lambda tensor: _Buffer(tensor.shape, tensor.dtype, tensor.device), arguments
    )


def launch_again(
    launches: Sequence[Launch], device: torch.device, launched: Callable[[], None]
) -> None:
    """Make launches again, in this order, on one buffer of zeros; ``launched`` is called for FSDP's."""
    if launches:
        size = max(launch.bytes for launch in launches)
        scratch = torch.zeros(size, dtype=torch.uint8, device=device)
        for launch in launches:
            launch.again(scratch)
            if launch.of_fsdp:
                launched()


class LaunchRecorder(TorchDispatchMode):
    """Shows each launch to ``before``, before it is made; also those inside of custom operators.

    ``refuse`` gives the reason why these tensors must not be reduced in place, if there is one.

    It takes nothing from compiled code: what a pass compiles while it is recorded stays compiled, and what it
    launches is known from the counts of its groups.
    """

    supports_higher_order_operators = True  # flex attention is one

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether code is compiled where this mode is on; without it, such code would never be compiled."""
        return True

    def __init__(
        self,
        before: Callable[[Launch], None],
        refuse: Callable[[Sequence[torch.Tensor]], str] = lambda tensors: "",
    ) -> None:
        super().__init__()
        self._before = before
        self._refuse = refuse

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)  # if it launches anything, the counts of its group tell
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # a sharded tensor's shape is being worked out
        if not all(kind in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a sharded tensor: what it launches for the plain ones inside is shown
        if func.namespace in _ONE_SIDED or _is_launch(func):
            launch = _seen(func, args, kwargs)
            if _name(func) in _IN_PLACE:
                given = [
                    leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
                ]
                launch = replace(launch, refused=launch.refused or self._refuse(given))
            self._before(launch)
        elif func.namespace not in _LAUNCH_NOTHING | _NAMESPACES:
            with self:
                return call_inside(func, args, kwargs)
        return func(*args, **kwargs)


def knows_one_sided_experts() -> bool:
    """Whether operators are loaded by which experts get their rows, and which no group counts."""
    spaces = (getattr(torch.ops, name) for name in _ONE_SIDED - {"symm_mem"})
    return any(hasattr(space, "dispatch") for space in spaces)


def _is_launch(operator: Any) -> bool:
    return operator.namespace in _NAMESPACES and _name(operator) not in _NO_LAUNCHES


def _name(operator: Any) -> str:
    return str(schema_of(operator).name).partition("::")[2]


def _seen(operator: Any, positional: Any, named: Any) -> Launch:
    why = ""
    if operator.namespace in _ONE_SIDED:
        why = "it reads and writes the memory of other ranks"
    elif _name(operator) in _POINT_TO_POINT:
        why = "each rank has a sequence of its own, as in a pipeline"
    group = dist.group.WORLD if why else _group_of(tree_leaves((positional, named)))
    assert group is not None
    arguments = _without_values((positional, named))
    sizes = _sizes_of_parts(_name(operator), positional)
    plain = (leaf for leaf in tree_leaves(arguments) if not isinstance(leaf, torch.ScriptObject))
    return Launch(
        operator,
        arguments,
        group,
        (str(operator), group.group_name, *plain),
        follows_data=_parts_follow_data(_name(operator), sizes),
        told_sizes=bool(sizes),
        refused=_refusal(operator, why) if why else "",
    )


def _sizes_of_parts(name: str, arguments: Sequence[Any]) -> list[list[int]]:
    """The sizes of parts that an all-to-all is told, by numbers or by its tensors; for others, none."""
    lists = [each for each in arguments if isinstance(each, (list, tuple)) and each]
    if name == "alltoall_":
        return [[part.numel() for part in each] for each in lists]
    return [[*each] for each in lists] if name in _ALL_TO_ALL else []


def _parts_follow_data(name: str, sizes: Sequence[Sequence[int]]) -> bool:
    """Whether parts of these sizes may have others. Tensors have to be listed even where they are alike."""
    if name == "alltoall_" and len({*chain(*sizes)}) == 1:
        return False
    return any(sum(map(bool, each)) != 1 for each in sizes)


def _refusal(operator: Any, why: str) -> str:
    return (
        f"model: it launches {operator}, which a rank that runs out of memory cannot complete: {why}. Use "
        "collectives of all ranks of a process group; or, in a recipe, choose batch_size yourself and set "
        "adaptive_batching.on_out_of_memory=raise."
    )


def _group_of(leaves: Sequence[Any]) -> dist.ProcessGroup:
    for leaf in leaves:
        if (group := group_in(leaf)) is not None:
            return group
    # Functional collectives name it, as the last of their texts.
    return group_named([leaf for leaf in leaves if isinstance(leaf, str)][-1])
