"""The models with which a step can survive running out of memory: compiled, and spread over ranks, how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core import private
from torchtune_adaptive.core.ranks import fsdp
from torchtune_adaptive.core.ranks.agreement import Ranks, SomeRanks


def wrapped_in(model: nn.Module) -> DistributedDataParallel | None:
    """The wrapper in a model, which may be wrapped again, as by Lightning Fabric or ``torch.compile``."""
    return next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)


def require_no_graphs(name: str, function: Any) -> None:
    """Check that a function, or no module of a model, is replayed as CUDA graphs.

    Raises:
        UsageError: one is; the message says what to use instead.
    """
    modules = function.modules() if isinstance(function, nn.Module) else [function]
    for graphed in filter(None, map(private.graphed_by, modules)):
        cure = "Do not call it"
        if graphed == "torch.compile":
            cure = (
                "Compile with mode='default' or 'max-autotune-no-cudagraphs', without "
                "options={'triton.cudagraphs': True} or TORCHINDUCTOR_CUDAGRAPHS"
            )
        raise UsageError(
            f"{name}: {graphed} replays it as CUDA graphs. A graph has one size of micro-batch, its memory "
            f"is not given back, and it cannot be left in the middle when memory runs out. {cure}."
        )


def require_watchable(models: Sequence[nn.Module]) -> None:
    """Check that what FSDP launches for these models can be watched, and completed by any rank.

    Raises:
        UsageError: it cannot; the message says what not to call.
    """
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule) and (groups := fsdp.groups_of_parameters(module)) > 1:
                raise UsageError(
                    f"model: fully_shard spreads the parameters of {name or 'the whole'} over {groups} "
                    "meshes (shard_placement_fn), and can be watched on one only. Use one mesh for all."
                )
        if called := fsdp.changed_communication(model):
            raise UsageError(
                f"model: {called} was called. A rank that runs out of memory completes what the others have "
                "launched by plain collectives on plain buffers, which may not be mixed with that. Do not "
                "call it."
            )


def require_supported(model: nn.Module, ranks: Ranks) -> None:
    """Check that the model is spread over the ranks in a way in which none is left waiting.

    Raises:
        UsageError: it is not; the message says what to use instead.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UsageError(
            "model: FullyShardedDataParallel (FSDP1) cannot be reset after running out of memory. Use "
            "torch.distributed.fsdp.fully_shard."
        )
    wrapped = wrapped_in(model)
    if wrapped is not None:
        _require_plain_replicas(model, wrapped, ranks)
    elif fsdp.roots(model):
        _require_whole_mesh(model, ranks)
    elif is_split(model):
        _require_all_ranks(model, ranks.size, ranks)
    elif ranks.size > 1:
        raise UsageError(
            f"model: there are {ranks.size} ranks, but nothing reduces its gradients. Apply fully_shard, or "
            "wrap it in DistributedDataParallel."
        )


def reason_not_to_reduce(models: Sequence[nn.Module], tensors: Sequence[torch.Tensor]) -> str:
    """The reason why tensors must not be reduced in place during a pass, if there is one: a gradient to which
    later micro-batches are added would be reduced again. FSDP reduces only what a micro-batch adds."""
    given = {tensor.data_ptr() for tensor in tensors if tensor.numel()}
    without_fsdp = [model for model in models if not fsdp.roots(model)]
    for name, parameter in (pair for model in without_fsdp for pair in model.named_parameters()):
        gradient = parameter.grad
        if type(gradient) is torch.Tensor and gradient.data_ptr() in given:
            return (
                f"model: a hook reduces the gradient of {name} over ranks after each micro-batch, along with "
                "the reduced sum of the earlier ones. transformers does so where tensor parallelism leaves "
                "norms whole. Apply fully_shard as well: DistributedConfig(fsdp_size=2) or more."
            )
    return ""


def is_split(model: nn.Module) -> bool:
    """Whether tensors are split, as by tensor parallelism."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def holders_of(model: nn.Module, ranks: Ranks) -> Ranks:
    """The ranks that hold the same rows as this one: those over which FSDP does not average gradients.

    Each comes with the same place among its own ranks of FSDP.
    """
    spread = fsdp.spread(model)
    if spread is None and is_split(model):
        return ranks.alike("all")
    if spread is None or spread.size == ranks.size:
        return SomeRanks()
    return ranks.alike(spread.here)


def sharers_of(holders: Ranks, ranks: Ranks, context: dist.ProcessGroup | None) -> Ranks:
    """The ranks with the same rows as this one, or other parts of them, as those of its ``context``."""
    if context is None:
        return holders
    mine = holders.members.union(dist.get_process_group_ranks(context))
    parts = ranks.gather(mine)
    while (joined := mine.union(*(part for part in parts if part & mine))) != mine:
        mine = joined
    return ranks.alike(min(mine))


def _require_plain_replicas(
    model: nn.Module, wrapped: DistributedDataParallel, ranks: Ranks
) -> None:
    inside = {id(parameter) for parameter in wrapped.parameters()}
    outside = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
    problem = None
    if outside:
        problem = f"{outside[0]} is outside of it. Wrap the whole model"
    elif wrapped.process_group.size() != ranks.size:
        problem = f"its group has {wrapped.process_group.size()} of {ranks.size} ranks. Use all"
    elif any(isinstance(parameter, DTensor) for parameter in wrapped.parameters()):
        problem = "its parameters are sharded. Use fully_shard on a mesh of two dimensions (HSDP)"
    elif wrapped.broadcast_buffers and ranks.size > 1 and any(True for _ in wrapped.buffers()):
        problem = "it broadcasts buffers in each forward pass. Pass broadcast_buffers=False"
    elif wrapped.mixed_precision is not None:
        problem = "its mixed_precision is not supported. Use torch.autocast in forward"
    elif sparse := [n for n, m in wrapped.named_modules() if getattr(m, "sparse", False) is True]:
        problem = (
            f"gradients of {sparse[0]} are sparse, and those in a bucket are not. Pass sparse=False"
        )
    elif private.has_communication_hook(wrapped):
        problem = "a communication hook would be bypassed. Do not register any"
    if problem:
        raise UsageError(f"model: DistributedDataParallel: {problem}.")


def _require_all_ranks(model: nn.Module, data_ranks: int, ranks: Ranks) -> None:
    """Check that parameters are spread over all ranks, or over those of FSDP and copied by the others."""
    split = [
        (n, p.device_mesh.size()) for n, p in model.named_parameters() if isinstance(p, DTensor)
    ]
    most = max(size for _, size in split)
    for name, size in split:
        if most != ranks.size or size not in (ranks.size, data_ranks):
            raise UsageError(
                f"model: {name} is spread over {size} of {ranks.size} ranks. Use a mesh of all ranks: for "
                "fully_shard one or two of its dimensions (HSDP), and the others for tensor parallelism."
            )


def _require_whole_mesh(model: nn.Module, ranks: Ranks) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            raise UsageError(
                f"model: {name} is not sharded, so nothing reduces its gradient. Apply fully_shard to the "
                "whole model, without ignored_params."
            )
    about = fsdp.spread(model)
    assert about is not None
    _require_all_ranks(model, about.size, ranks)
    for copies in fsdp.replicas(model):
        if copies.size() == about.size and ranks.size > 1:
            raise UsageError(
                "model: the shard dimension of its mesh has one rank, so nothing is sharded. Use "
                "DistributedDataParallel, or a mesh of one dimension."
            )
    if called := fsdp.changed_reduction(model):
        raise UsageError(
            f"model: {called} was called. A step sums the gradients of every micro-batch over all ranks and "
            "divides them by its own weight. Do not call it."
        )
