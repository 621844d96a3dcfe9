"""Checks that refuse what cannot work with a ``UsageError``: one line that says why and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtune_adaptive.common import UsageError, arguments, counted
from torchtune_adaptive.library import private
from torchtune_adaptive.library.private import tree_leaves


def device_of(model: nn.Module) -> torch.device:
    """The device that a model runs on; with CPU offload, its parameters wait elsewhere."""
    first = next(model.parameters())
    if not isinstance(first, DTensor):
        return first.device
    kind, waits = first.device_mesh.device_type, first.to_local().device
    if waits.type == kind:
        return waits
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


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer itself, where Lightning Fabric or accelerate has wrapped it."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, Optimizer):
        raise UsageError(f"optimizer: {type(inner).__name__} is not a torch.optim.Optimizer.")
    return inner


def weighted(result: object) -> tuple[torch.Tensor, int]:
    """The summed loss and its weight, if they are what ``forward`` returned."""
    if not isinstance(result, tuple) or len(result) != 2:
        alone = (
            " One tensor may be a mean, which would count once for each micro-batch: return (mean * terms, "
            "terms); or, for shares of the loss, pass AdaptiveStep(..., shares=True)."
        )
        raise UsageError(
            f"forward: returned {kind(result)}, but must return two values: the loss, summed over its terms, "
            f"and their number.{alone if isinstance(result, torch.Tensor) else ''}"
        )
    loss, weight = result
    loss = differentiable(loss)
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        weight = weight.item()
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or not 0 <= weight < math.inf or int(weight) != weight:
        raise UsageError(
            f"forward: the weight is {kind(weight)}, but must be the number of terms in the loss, 0 or more."
        )
    return loss, int(weight)


def differentiable(loss: object) -> torch.Tensor:
    """A loss that has a gradient, if it is one."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise UsageError(
            f"forward: the loss is {kind(loss)}, but must be a tensor of one real number: the sum over all "
            "terms."
        )
    if not loss.requires_grad:
        reason = (
            "Compute it from the model's output, without detach() or item()"
            if torch.is_grad_enabled()
            else "Do not take a step inside torch.no_grad() or torch.inference_mode()"
        )
        raise UsageError(f"forward: the loss requires no gradient. {reason}.")
    return loss.reshape(()) if loss.ndim else loss


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


def kind(value: object) -> str:
    """A value in the words of an error."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    if value is None or isinstance(value, (int, float)):
        return repr(value)
    return counted(len(value), "value") if isinstance(value, tuple) else f"a {type(value).__name__}"


def number_of_rows(rows: Any) -> int:
    """The number of rows in a list of rows, which a batch that has been collated is not."""
    is_sequence = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    if isinstance(rows, Mapping) or not is_sequence:
        raise UsageError(
            f"rows: a {type(rows).__name__} is not a list of rows. Pass rows that are not collated yet: "
            "DataLoader(..., collate_fn=list) gives them."
        )
    return len(rows)


def row_groups(groups: Any, rows: int, lengths: Any) -> tuple[int, ...] | None:
    """The rows of each group, if they are all rows; None where rows are not in groups."""
    if groups is None:
        return None
    if lengths is not None:
        raise UsageError(
            "groups: not with lengths, by which rows are put together. Pass one of them."
        )
    if not isinstance(groups, Sequence):
        raise UsageError(
            f"groups: {groups!r} is not a list of numbers. Pass the rows in each group."
        )
    groups = tuple(arguments.whole("groups", each) for each in groups)
    if sum(groups) != rows:
        raise UsageError(
            f"groups: {sum(groups)} rows of {rows}. Pass the number of rows in each group, in their order."
        )
    return groups


def row_numbers(numbers: Any, rows: int) -> Sequence[int]:
    """The numbers of rows in their step, if each row has one of its own."""
    if not isinstance(numbers, Sequence) or isinstance(numbers, str):
        raise UsageError(
            f"numbers: a {type(numbers).__name__} is not a list of numbers. Pass the number of each row in "
            "the step of all ranks."
        )
    for number in numbers:
        arguments.whole("numbers", number, at_least=0)
    if len(numbers) != rows or len({*numbers}) < rows:
        raise UsageError(
            f"numbers: {len({*numbers})} different ones for {counted(rows, 'row')}. Pass one for each row, "
            "as it has among the rows of all ranks."
        )
    return numbers


def row_lengths(lengths: Any, rows: int, tokens: int) -> list[int]:
    """The tokens in each row, if they are so many numbers and none is above the budget."""
    if not isinstance(lengths, Sequence) or isinstance(lengths, str):
        raise UsageError(
            f"lengths: a {type(lengths).__name__} is not a list of numbers. Pass the tokens in each row."
        )
    if len(lengths) != rows:
        raise UsageError(
            f"lengths: {len(lengths)} for {counted(rows, 'row')}. Pass the tokens in each row."
        )
    numbers = [arguments.whole("lengths", length) for length in lengths]
    if max(numbers, default=0) > tokens:
        raise UsageError(
            f"lengths: row {numbers.index(max(numbers))} has {max(numbers)} tokens, and a micro-batch may "
            f"have {tokens} (size). Pass a larger size, or cut rows."
        )
    return numbers


def elements(batch: Any) -> list[int]:
    """The numbers in each tensor of a batch."""
    return [tensor.numel() for tensor in _tensors_in(batch)]


def rows_in(batch: Any) -> int:
    """The rows of a batch: the length of its first tensor."""
    return next((len(tensor) for tensor in _tensors_in(batch) if tensor.ndim), 1)


def _tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors in a batch; torch does not know mappings such as transformers' ``BatchEncoding``."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors_in(list(leaf.values()))


def one_dimension(name: str, value: Any) -> dist.ProcessGroup | None:
    """The process group of a mesh of one dimension, or None."""
    if value is None:
        return None
    if not isinstance(value, DeviceMesh) or value.ndim != 1:
        raise UsageError(
            f'{name}: {value!r} is not a mesh of one dimension. Pass one, such as mesh["cp"].'
        )
    return value.get_group()


def modules(name: str, value: Any) -> tuple[nn.Module, ...]:
    """A list of modules, which a module that has others may look like."""
    if isinstance(value, nn.Module):
        raise UsageError(f"{name}: a {type(value).__name__} is one model. Pass a list: [model].")
    if not isinstance(value, Sequence) or not all(isinstance(one, nn.Module) for one in value):
        raise UsageError(f"{name}: {value!r} is not a list of modules.")
    return tuple(value)


def normalizes_over_rows(model: nn.Module) -> str:
    """The name of a layer in training mode that normalizes over the rows of a micro-batch, or nothing."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    found = (
        name for name, each in model.named_modules() if isinstance(each, kinds) and each.training
    )
    return next(found, "")
