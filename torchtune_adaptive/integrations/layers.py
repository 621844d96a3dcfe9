"""The layers of a transformers model, whose activation checkpointing is switched one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.integrations import private
from torchtune_adaptive.library import LayerCheckpointing

_NAMES = ("activation_checkpointing", "gradient_checkpointing")
"""How a model's methods for it begin; the older names warn where there are others."""


def all_at_once(
    trainer: Any,
) -> tuple[Callable[[], Any], Callable[[], Any]] | LayerCheckpointing | None:
    """What turns activation checkpointing of all layers on, and back: two functions where it is off; None
    where it is on in all of them, or cannot be."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if _by_others(trainer) or not getattr(model, "supports_gradient_checkpointing", False):
        return None
    name = _name(model)
    if getattr(model, f"is_{name}"):
        found = _layers_of(model)
        return found if found is not None and found.checkpointed < found.layers else None
    enable, disable = getattr(model, f"{name}_enable"), getattr(model, f"{name}_disable")
    put_back = as_they_are(trainer)
    return lambda: enable({"use_reentrant": False}), lambda: (disable(), put_back())


def as_they_are(trainer: Any) -> Callable[[], None]:
    """The function that checkpoints those layers again that are checkpointed now, and takes hooks away that
    checkpointing others has brought."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    name, had_hooks = "gradient_checkpointing", private.has_input_hooks(model)
    layers = [(each, getattr(each, name)) for each in model.modules() if hasattr(each, name)]

    def put_back() -> None:
        for layer, on in layers:
            setattr(layer, name, on)
        if private.has_input_hooks(model) and not had_hooks:
            model.disable_input_require_grads()

    return put_back


def one_by_one(trainer: Any) -> LayerCheckpointing:
    """The layers of a trainer's model, of which those are checkpointed that the trainer checkpoints."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if by := _by_others(trainer):
        raise UsageError(
            f"fastest: with {by}, layers cannot be switched one by one. Leave one off."
        )
    found = _layers_of(model)
    if found is None:
        raise UsageError(
            f"fastest: {type(model).__name__} has no layers whose checkpointing transformers can switch. "
            "Leave it off."
        )
    name = _name(model)
    if not getattr(model, f"is_{name}"):
        getattr(model, f"{name}_enable")({"use_reentrant": False})  # gives each layer its function
        found.use(found.configured)
    return found


def _layers_of(model: Any) -> LayerCheckpointing | None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    on = [each.gradient_checkpointing for each in layers]
    return LayerCheckpointing(layers, _switch, on) if layers else None


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
