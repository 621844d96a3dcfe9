"""All private interfaces of torch that tracing needs, as there is no public way.

Each was checked on torch 2.11, 2.13 and 2.15, where it does not say otherwise. Whether traces are right with
the installed version is checked as well, before one is used (see ``recipe.tracing.self_check``).
"""

# ruff: noqa: F401 - what is imported here is for the other modules of the package
from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload

# Fake tensors have shapes and storages, but no memory; dispatch modes see each operation.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, _sharding_prop
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

# A context in which no dispatch mode or subclass sees an operation.
without_dispatch = torch._C._DisableTorchDispatch
# Gives torch a device that Python supplies; every other way takes a build of torch.
register_device = _setup_privateuseone_for_python_backend


def join_fake_group(backend: str, devices: list[str], rank: int, ranks: int) -> None:
    """Join a process group, registered as ``backend``, whose collectives return tensors without values."""
    from torch.testing._internal.distributed import fake_pg

    if backend not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            backend, fake_pg._create_fake_pg, extended_api=True, devices=devices
        )
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, rank=rank, world_size=ranks, store=fake_pg.FakeStore())


def schema_of(operation: Any) -> Any:
    """The name, arguments and results of an operation."""
    return operation._schema


def group_of(arguments: Iterable[Any]) -> tuple[int, ...]:
    """The size of the process group among a collective's arguments, and the distance of its ranks; empty if
    there is none (torch 2.13)."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):  # the group comes before the kind of reduction
            argument = dist.ProcessGroup.unbox(argument)
        if isinstance(argument, dist.ProcessGroup):
            ranks = dist.get_process_group_ranks(argument)
            return len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return ()


def in_backward() -> bool:
    """Whether autograd runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def references(storage: torch.UntypedStorage) -> int:
    """The references to a storage, which autograd counts to decide whether it sums in place."""
    return torch._C._storage_Use_Count(storage._cdata)


def is_same(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Whether two Python objects stand for one storage."""
    return one._cdata == other._cdata


def with_shard(sharded: DTensor, make: Callable[[torch.Tensor], torch.Tensor]) -> DTensor:
    """A tensor that is sharded in the same way, with a shard that is made from that of the first."""
    return DTensor(make(sharded._local_tensor), sharded._spec, requires_grad=False)


def communication_streams(model: nn.Module) -> Any:
    """The streams on which FSDP allocates what it gathers and reduces, as attributes; None without FSDP."""
    return model._get_fsdp_state()._comm_ctx if isinstance(model, FSDPModule) else None


_FOR_STRIDED = "_propagate_use_strided_shard_flag"


def of_sharding(
    unseen: Callable[[], AbstractContextManager[None]],
) -> Iterable[tuple[Any, str, Any]]:
    """Replacements in torch while a sharded model is traced: owner, name, replacement. Shapes are computed
    ``unseen``, in a context in which nothing is recorded, on tensors of the whole model's size."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen_propagation(propagator: ShardingPropagator, schema: Any) -> Any:
        with unseen():
            return propagate(propagator, schema)

    yield ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen_propagation
    if hasattr(_sharding_prop, _FOR_STRIDED):  # in torch 2.13; not every version has it
        yield _sharding_prop, _FOR_STRIDED, _once_for_each_schema()


def _once_for_each_schema() -> Callable[..., None]:
    """torch's treatment of strided placements, in linear time: torch looks for them in all tensors of a list
    (an optimizer's, say) once for each of these tensors, which takes as long as a layer."""
    correct = getattr(_sharding_prop, _FOR_STRIDED)
    without: list[Any] = [None]

    def propagate(strategy: Any, schema: Any, *others: Any) -> None:
        if schema is without[0]:
            return
        placements = (one for spec in schema.args_spec for one in spec.placements)
        if any(isinstance(one, _StridedShard) for one in placements):
            correct(strategy, schema, *others)
        else:
            without[0] = schema  # for which it does nothing

    return propagate
