"""The layers of a transformers model, whose activation checkpointing is switched one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.library import LayerCheckpointing

_NAMES = ("activation_checkpointing", "gradient_checkpointing")
"""How a model's methods for it begin; the older names warn where there are others."""


def two_functions(trainer: Any) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """Those that turn activation checkpointing on and off, where it is off and can be on."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if _by_others(trainer) or not getattr(model, "supports_gradient_checkpointing", False):
        return None
    name = _name(model)
    if getattr(model, f"is_{name}"):
        return None
    enable, disable = getattr(model, f"{name}_enable"), getattr(model, f"{name}_disable")
    return lambda: enable({"use_reentrant": False}), disable


def one_by_one(trainer: Any) -> LayerCheckpointing:
    """The layers of a trainer's model, with as many checkpointed as the trainer has: all, or none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model = trainer.accelerator.unwrap_model(trainer.model)
    if by := _by_others(trainer):
        raise UsageError(
            f"fastest: with {by}, layers cannot be switched one by one. Leave one off."
        )
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not layers:
        raise UsageError(
            f"fastest: {type(model).__name__} has no layers whose checkpointing transformers can switch. "
            "Leave it off."
        )
    name = _name(model)
    was_on = getattr(model, f"is_{name}")
    if not was_on:
        getattr(model, f"{name}_enable")({"use_reentrant": False})  # gives each layer its function
    found = LayerCheckpointing(layers, _switch)
    if not was_on:
        found.set(0)
    return found


def _switch(layer: Any, on: bool) -> None:
    layer.gradient_checkpointing = on


def _name(model: Any) -> str:
    return next(each for each in _NAMES if hasattr(model, f"{each}_enable"))


def _by_others(trainer: Any) -> str:
    """The setting by which code is compiled, or checkpointed by FSDP."""
    if trainer.args.torch_compile:
        return "torch_compile"
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if getattr(plugin, "activation_checkpointing", False):
        return "activation_checkpointing of fsdp_config"
    return ""
