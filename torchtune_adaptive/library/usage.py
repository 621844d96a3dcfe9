"""Checks that refuse what cannot work with a ``UsageError``: one line that says why and what to do."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core import Ranks, fsdp, wrapped_in
from torchtune_adaptive.library import private
from torchtune_adaptive.library.private import tree_leaves


def device_of(model: nn.Module) -> torch.device:
    """The device that a model runs on; with CPU offload, its parameters wait elsewhere."""
    first = next(model.parameters())
    kind = first.device_mesh.device_type if isinstance(first, DTensor) else first.device.type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def require_trainable(model: nn.Module, optimizer: Optimizer) -> None:
    """Check that the model has weights, and that the optimizer is for them."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise UsageError("model: no parameter requires a gradient, so there is nothing to train.")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UsageError(
                f"model: {name} is on the meta device, so it has no value. Call model.to_empty(device=...) "
                "and load or initialize its weights first."
            )
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if strangers := len(optimized - {id(p) for p in model.parameters()}):
        raise UsageError(
            f"optimizer: {strangers} of its {len(optimized)} parameters are not the model's. Create the "
            "optimizer after fully_shard, which replaces the parameters, and from model.parameters()."
        )
    if missing := [name for name, p in trained.items() if id(p) not in optimized]:
        raise UsageError(
            f"optimizer: {missing[0]} (and {len(missing) - 1} more) requires a gradient, but is not among "
            "its parameters. Add it, or call requires_grad_(False)."
        )


def require_supported(model: nn.Module, ranks: Ranks) -> None:
    """Check that the model is spread over the ranks in a way in which none is left waiting."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UsageError(
            "model: FullyShardedDataParallel (FSDP1) cannot be reset after running out of memory. Use "
            "torch.distributed.fsdp.fully_shard."
        )
    wrapped = wrapped_in(model)
    if wrapped is not None:
        _require_plain_replicas(model, wrapped, ranks)
    elif roots := fsdp.roots(model):
        _require_whole_mesh(model, roots, ranks)
    elif any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UsageError(f"model: {_TENSOR_PARALLEL}")
    elif ranks.size > 1:
        raise UsageError(
            f"model: there are {ranks.size} ranks, but nothing reduces its gradients. Apply fully_shard, or "
            "wrap it in DistributedDataParallel."
        )


_TENSOR_PARALLEL = (
    "tensor and context parallelism are not supported: their layers launch collectives of their own, which "
    "a rank that runs out of memory cannot complete. Use fully_shard over all ranks, on a mesh of one "
    "dimension or of two (replicate, shard)."
)


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
    elif private.has_communication_hook(wrapped):
        problem = "a communication hook would be bypassed. Do not register any"
    if problem:
        raise UsageError(f"model: DistributedDataParallel: {problem}.")


def _require_whole_mesh(model: nn.Module, roots: list[FSDPModule], ranks: Ranks) -> None:
    if len(roots) > 1:
        raise UsageError(
            f"model: fully_shard was applied to {len(roots)} parts, but not to the whole, so there is no one "
            "root that could be reset after running out of memory. Apply it to the model, too, at the end."
        )
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UsageError(
                f"model: {name} is not sharded, so nothing reduces its gradient. Apply fully_shard to the "
                "whole model, without ignored_params."
            )
        mesh, placements = parameter.device_mesh, parameter.placements
        one = mesh.ndim == 1 and isinstance(placements[0], Shard)
        two = mesh.ndim == 2 and isinstance(placements[0], Replicate)
        if not one and not (two and isinstance(placements[1], Shard)):
            raise UsageError(f"model: {name} is placed as {placements}: {_TENSOR_PARALLEL}")
        if mesh.size() != ranks.size:
            raise UsageError(
                f"model: {name} is spread over {mesh.size()} of {ranks.size} ranks: {_TENSOR_PARALLEL}"
            )
        if two and mesh.size(1) == 1 and ranks.size > 1:
            raise UsageError(
                "model: the shard dimension of its mesh has one rank, so nothing is sharded. Use "
                "DistributedDataParallel, or a mesh of one dimension."
            )
    if called := fsdp.changed_reduction(model):
        raise UsageError(
            f"model: {called} was called. A step sums the gradients of every micro-batch over all ranks and "
            "divides them by its own weight. Do not call it."
        )


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer itself, where Lightning Fabric or accelerate has wrapped it."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, Optimizer):
        raise UsageError(f"optimizer: {type(inner).__name__} is not a torch.optim.Optimizer.")
    return inner


def weighted(result: object) -> tuple[torch.Tensor, int]:
    """The summed loss and its weight, if they are what ``forward`` returned."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise UsageError(
            f"forward: returned {_kind(result)}, but must return two values: the loss, summed over its "
            "terms, and their number."
        )
    loss, weight = result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UsageError(
            f"forward: the loss is {_kind(loss)}, but must be a scalar tensor that requires a gradient. Sum "
            "it over its terms, and compute it from the model's output."
        )
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        weight = weight.item()
    if isinstance(weight, bool) or int(weight) != weight or weight < 0:
        raise UsageError(
            f"forward: the weight is {weight!r}, but must be the number of terms in the loss, 0 or more."
        )
    return loss.reshape(()), int(weight)


def require_sum(loss: torch.Tensor, weight: int) -> None:
    """Check that the last thing that was computed is not a mean.

    The mean of one term is its sum, and a mean that is multiplied again may be one.
    """
    node = loss.grad_fn
    while node is not None and node.name() in _SAME_NUMBER:
        node = node.next_functions[0][0]
    mean = private.saved(node, "reduction") == _MEAN
    if node is not None and node.name() == "MeanBackward0":
        mean = private.saved(node, "self_sym_numel", 1) > 1
    if mean:
        raise UsageError(
            f"forward: the loss is a mean, and its weight is {weight}, so it would be divided twice. Return "
            "the sum over all terms, for example with reduction='sum', and the number of terms."
        )


_MEAN = 1  # as torch's losses count reductions
_SAME_NUMBER = {"ToCopyBackward0", "ViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0"}
_SAME_NUMBER |= {"AliasBackward0", "CloneBackward0", "UnsafeViewBackward0"}


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{len(value)} values" if isinstance(value, tuple) else f"a {type(value).__name__}"


def elements(batch: Any) -> int:
    """The numbers in a batch."""
    return sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def rows_in(batch: Any) -> int:
    """The rows of a batch: the length of its first tensor."""
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    return next((len(tensor) for tensor in tensors if tensor.ndim), 1)
