"""The memory knobs of a config as switches on the model that was built from it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtune import modules
from torchtune.modules import TiedLinear
from torchtune.modules.model_fusion import DeepFusionModel

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.core import NextTokenPrediction, Objective, knobs, recompute
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.knob_table import (
    KNOBS_BY_KEY,
    SHARDED_LAYERS,
    configured_choice,
    with_choice,
)
from torchtune_adaptive.recipe.setup.environment import Environment
from torchtune_adaptive.recipe.setup.optimizer import build_loss
from torchtune_adaptive.recipe.upstream import is_chunked_cross_entropy


class CanBeEnabled(Protocol):
    """Activation offloading, of a run or of a trace."""

    enabled: bool


def build_switches(
    asked: Asked,
    environment: Environment,
    model: nn.Module,
    objective: Objective,
    offloading: CanBeEnabled | None = None,
) -> knobs.Switches:
    """The switches of a model that is trained for an objective, set as the config says."""
    layers = [
        recompute.SwitchedLayer(layer)
        for layer in model.modules()
        if isinstance(layer, modules.TransformerSelfAttentionLayer)
    ]

    def checkpoint(value: str) -> None:
        _require_of_model(value, len(layers))
        for layer, recomputed in zip(
            layers, recompute.recomputed_layers(value, len(layers)), strict=True
        ):
            layer.recomputed = recomputed

    setters: dict[str, Any] = {knobs.CHECKPOINT: checkpoint}
    if isinstance(model, FSDPModule):
        setters[knobs.RESHARD] = model.set_reshard_after_forward
    # torchtune refuses to offload where a decoder stands beside an encoder.
    if offloading is not None and not hasattr(model, "decoder"):
        setters[knobs.OFFLOADING] = lambda value: setattr(offloading, "enabled", value)
    if type(objective) is NextTokenPrediction:
        setters |= _of_the_loss(asked, environment, model, objective)
    configured = knobs.Choice({key: KNOBS_BY_KEY[key].configured(asked) for key in setters})
    switches = knobs.Switches(setters, configured, len(layers))
    checkpoint(switches.choice[knobs.CHECKPOINT])
    if switches.choice.get(knobs.RECOMPUTE_LOSS):
        setters[knobs.RECOMPUTE_LOSS](True)
    return switches


def _require_of_model(checkpoint: str, layers: int) -> None:
    """Raise unless a value for so many of a model's layers is for a model that has as many as this one."""
    first = knobs.layers_of(checkpoint)
    if first and first[1] != layers:
        raise ConfigError(
            knobs.CHECKPOINT,
            checkpoint,
            f"is for a model of {first[1]} layers, but this one has {layers}",
            f"Set it to all, or have use_fastest_configuration choose how many of {layers}",
        )


def _of_the_loss(
    asked: Asked, environment: Environment, model: nn.Module, objective: NextTokenPrediction
) -> dict[str, Any]:
    def loss(component: str) -> None:
        ranks = environment.ranks.size
        choice = configured_choice(asked, ranks) | {knobs.LOSS: component}
        changed = with_choice(asked, ranks, choice)
        model.set_num_output_chunks(0)  # type: ignore[operator]
        objective.loss_fn = build_loss(changed, environment, model)

    # Batches are made for a projection that is sharded by itself and runs once a chunk (``data.rows``).
    apart = "output" in (asked[SHARDED_LAYERS] or ())
    setters: dict[str, Any] = {} if apart else {knobs.LOSS: loss}
    # Where layers are split, logits are whole only outside of the projection.
    head = head_of(model) if asked.holders == 1 else None
    if head is not None and is_chunked_cross_entropy(objective.loss_fn):
        objective.recomputed = chunks = recompute.RecomputedChunks(
            head, lambda logits, labels: objective.loss_fn.compute_cross_entropy(logits, labels)
        )
        setters[knobs.RECOMPUTE_LOSS] = lambda value: setattr(chunks, "on", value)
    return setters


def head_of(model: nn.Module) -> nn.Module | None:
    """The last projection of a model, which gives its logits."""
    decoder = model.decoder if isinstance(model, DeepFusionModel) else model
    head = getattr(decoder, "output", None)
    head = head.linear if isinstance(head, TiedLinear) else head
    return head if isinstance(head, nn.Module) else None
