"""Weights without values: a model on the meta device gets its tensors on another device."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.planner.private import is_traceable_wrapper_subclass, with_shard


def fill(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters of a model on the meta device, as loading a checkpoint would, and its buffers.
    Tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}

    def filled(parameter: torch.Tensor) -> nn.Parameter:
        if id(parameter) not in made:
            made[id(parameter)] = new(parameter)
        return made[id(parameter)]

    def new(parameter: torch.Tensor) -> nn.Parameter:
        trained = parameter.requires_grad
        if isinstance(parameter, DTensor):
            parameter = with_shard(parameter, lambda shard: _empty(shard, device))
        else:
            parameter = _empty(parameter.detach(), device)
        return nn.Parameter(parameter, requires_grad=trained)

    # Not by a state dict: hooks of modules change what is loaded by its values, and there are none.
    for module in model.modules():
        for name, value in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            setattr(module, name, filled(value))
    for module in model.modules():
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            if buffer.device.type != device.type:
                setattr(module, name, torch.empty_like(buffer, device=device))


def _empty(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like one on the meta device; a quantized one consists of several."""
    if not is_traceable_wrapper_subclass(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    names, context = tensor.__tensor_flatten__()
    parts = {name: _empty(getattr(tensor, name), device) for name in names}
    context = dict(context)
    context["tensor_meta"] = dataclasses.replace(context["tensor_meta"], device=device)
    return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
