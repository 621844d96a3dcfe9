"""Weights without values: a model on the meta device gets its tensors on another device."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtune_adaptive.setup.environment import Environment
from torchtune_adaptive.setup.model import initialize_ropes, parameters_by_name


def fill(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters on the device, as loading a checkpoint would."""

    def filled(parameter: torch.Tensor) -> nn.Parameter:
        trained = parameter.requires_grad
        if isinstance(parameter, DTensor):
            local = _empty(parameter._local_tensor, device)
            parameter = DTensor(local, parameter._spec, requires_grad=False)
        else:
            parameter = _empty(parameter.detach(), device)
        return nn.Parameter(parameter, requires_grad=trained)

    model.load_state_dict(
        {name: filled(value) for name, value in parameters_by_name(model).items()},
        strict=False,
        assign=True,
    )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def initialize_fake_ropes(model: nn.Module, environment: Environment) -> None:
    for module in model.modules():
        if hasattr(module, "apply_scaling"):  # Llama 3.1's reads values, and fake tensors have none
            module.apply_scaling = lambda freqs, *_, **__: torch.empty_like(freqs)  # type: ignore
    initialize_ropes(model, environment)


def _empty(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like one on the meta device; a quantised one consists of several."""
    if not is_traceable_wrapper_subclass(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    names, context = tensor.__tensor_flatten__()
    parts = {name: _empty(getattr(tensor, name), device) for name in names}
    context = dict(context)
    context["tensor_meta"] = dataclasses.replace(context["tensor_meta"], device=device)
    return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
