"""Weights without values: a model on the meta device gets its tensors on another device."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.planner.private import is_traceable_wrapper_subclass, with_shard


def fill(
    model: nn.Module, device: torch.device, parameters: dict[str, nn.Parameter] | None = None
) -> None:
    """Allocate the parameters of a model on the meta device, as loading a checkpoint would. Tied ones stay
    tied. ``parameters`` are by the names under which the model loads them, where these are not their own."""
    if parameters is None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
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

    model.load_state_dict(
        {name: filled(value) for name, value in parameters.items()}, strict=False, assign=True
    )
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
