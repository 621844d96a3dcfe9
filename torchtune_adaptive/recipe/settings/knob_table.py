"""The memory knobs: settings that trade memory for speed and leave the training as it is.

One table, which everything reads that changes a config on the user's behalf. An ``exact`` knob changes no bit
of losses and weights where kernels are deterministic (docs/determinism.md). A ``rounding`` knob does the same
arithmetic in another order. A ``named`` one is changed only where the user names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.core import Choice, knobs
from torchtune_adaptive.recipe.settings.asked import ACCUMULATION, Asked

Effect = Literal["exact", "rounding", "named"]
Config = DictConfig | Mapping[str, Any]
WHOLE = "torch.nn.CrossEntropyLoss"

SHARDED_LAYERS = "custom_sharded_layers"
FUSED = "optimizer.fused"


@dataclass(frozen=True)
class Knob:
    """One setting that may be chosen.

    Args:
        key: the path of the setting in a config.
        effect: the effect of a change on the training.
        values: the values that it can have where this is asked for on a number of ranks, from the most
            memory to the least; none where it has no meaning.
        configured: the value that it has in a config.
        switch: True if it can be changed on a model that is already built.
    """

    key: str
    effect: Effect
    values: Callable[[Asked, int], tuple[Any, ...]]
    configured: Callable[[Asked], Any]
    switch: bool = True


def configured_checkpoint(asked: Asked) -> str:
    """Which activations a config computes again in backward, by our setting or by torchtune's."""
    if asked.settings.activation_checkpointing:
        return asked.settings.activation_checkpointing
    every_layer, mode = asked["enable_activation_checkpointing"], asked["ac_mode"]
    if every_layer or mode is None:
        # torchtune's recipe does neither where both are set.
        return "all" if every_layer and mode is None else "none"
    option = asked["ac_option"]
    if mode != "selective":
        return "all" if mode == "full" else "none"
    if option == "op":
        return "operations"
    return f"every_{option}" if option and option > 1 else "all"


def _checkpoint_values(asked: Asked, ranks: int, layers: int = 0) -> tuple[str, ...]:
    """Those for a model of so many layers; where their number is not known, none that needs it."""
    some = [knobs.first_layers(count, layers) for count in range(1, layers)]
    values = ["none", *some, "operations", "all"]
    if asked[knobs.COMPILE]:
        values.remove("operations")  # compiled regions are no single operations any more
    mine = configured_checkpoint(asked)
    return tuple(values if mine in values else [*values, mine])


def _reshard_values(asked: Asked, ranks: int) -> tuple[bool, ...]:
    return (False, True) if asked.holders < ranks else ()


def _sharded_layers_values(asked: Asked, ranks: int) -> tuple[Any, ...]:
    if not _reshard_values(asked, ranks):
        return ()
    choices = [None, ("tok_embeddings", "output")]
    mine = _sharded_layers(asked)
    return tuple(choices if mine in choices else [*choices, mine])


def _sharded_layers(asked: Asked) -> tuple[str, ...] | None:
    return tuple(asked[SHARDED_LAYERS] or ()) or None


def _offloading_values(asked: Asked, ranks: int) -> tuple[bool, ...]:
    # torchtune refuses to offload for a model of images; with layers or rows that are split nobody has tried.
    possible = asked["device"] == "cuda" and not asked.images
    return (False, True) if possible and asked.sharers == 1 else ()


def _micro_batches(asked: Asked, ranks: int) -> tuple[int, ...]:
    """All that make up the configured rows of a step."""
    if asked["optimizer_in_bwd"]:
        return ()  # a step is one micro-batch
    rows = asked.batch(ranks).rows
    return tuple(size for size in range(rows, 0, -1) if rows % size == 0)


def _if_chunked(asked: Asked, ranks: int) -> tuple[bool, ...]:
    return (False, True) if _losses(asked, ranks) and asked.holders == 1 else ()


def _losses(asked: Asked, ranks: int) -> tuple[str, ...]:
    mine = OmegaConf.select(asked.cfg, knobs.LOSS)
    # Where another model's loss is part of it, it is not known how to change both.
    if mine not in (WHOLE, knobs.CHUNKED) or asked.kind.frozen:
        return ()
    batches_are_made_for_it = "output" in (_sharded_layers(asked) or ())  # see ``recipe.data.rows``
    return (mine,) if batches_are_made_for_it else (WHOLE, knobs.CHUNKED)


def _fused(asked: Asked, ranks: int) -> tuple[bool, ...]:
    component = OmegaConf.select(asked.cfg, "optimizer._component_")
    if asked.holders > 1:
        return ()  # its kernel does not take layers that are split
    return (False, True) if component in ("torch.optim.AdamW", "torch.optim.Adam") else ()


KNOBS: tuple[Knob, ...] = (
    Knob(knobs.CHECKPOINT, "exact", _checkpoint_values, configured_checkpoint),
    Knob(knobs.RESHARD, "exact", _reshard_values, lambda asked: asked[knobs.RESHARD]),
    Knob(knobs.OFFLOADING, "exact", _offloading_values, lambda asked: asked[knobs.OFFLOADING]),
    Knob(knobs.RECOMPUTE_LOSS, "exact", _if_chunked, lambda asked: asked.settings.recompute_loss),
    Knob(SHARDED_LAYERS, "exact", _sharded_layers_values, _sharded_layers, switch=False),
    Knob(knobs.MICRO_BATCH, "rounding", _micro_batches, lambda asked: asked[knobs.MICRO_BATCH]),
    Knob(knobs.LOSS, "rounding", _losses, lambda asked: asked.cfg.loss._component_),
    Knob(
        FUSED,
        "rounding",
        _fused,
        lambda asked: asked.cfg.optimizer.get("fused", False),
        switch=False,
    ),
    Knob(
        knobs.COMPILE,
        "named",
        lambda asked, ranks: () if asked["quantizer"] or asked.sharers > 1 else (False, True),
        lambda asked: asked[knobs.COMPILE],
        switch=False,
    ),
)

KNOBS_BY_KEY = {knob.key: knob for knob in KNOBS}


def may_be_changed(knob: Knob, may_change: str | tuple[str, ...]) -> bool:
    """Whether the setting ``adaptive_batching.may_change`` allows it."""
    if may_change == "exact":
        return knob.effect == "exact"
    if may_change == "rounding":
        return knob.effect in ("exact", "rounding")
    return knob.key in may_change


def configured_choice(asked: Asked, ranks: int) -> Choice:
    """The value of each knob that has a meaning here, as the config sets it."""
    return Choice({knob.key: knob.configured(asked) for knob in KNOBS if knob.values(asked, ranks)})


def choices(
    asked: Asked,
    ranks: int,
    may_change: str | tuple[str, ...],
    *,
    layers: int = 0,
    switches_only: bool = False,
) -> list[Choice]:
    """Everything that may be chosen, the config's own values first.

    Args:
        layers: the number of the model's layers, of which any may be checkpointed.
        switches_only: True to leave out what needs another model to be built.
    """
    own = configured_choice(asked, ranks)

    def values(knob: Knob) -> tuple[Any, ...]:
        if not may_be_changed(knob, may_change) or (switches_only and not knob.switch):
            return (own[knob.key],)
        if knob.key == knobs.CHECKPOINT:
            return _checkpoint_values(asked, ranks, layers)
        return knob.values(asked, ranks)

    possible = [values(knob) for knob in KNOBS if knob.key in own]
    found = (Choice(dict(zip(own, values, strict=True))) for values in product(*possible))
    return [own, *(one for one in found if one != own and one.is_possible())]


@dataclass(frozen=True)
class Change:
    """A knob that is changed."""

    key: str
    old: Any
    new: Any
    effect: Effect

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)} ({self.effect})"


def changes(old: Choice, new: Choice) -> list[Change]:
    """What differs between two choices for the same config."""
    return [
        Change(key, old[key], value, KNOBS_BY_KEY[key].effect)
        for key, value in new.items()
        if value != old[key]
    ]


def with_choice(asked: Asked, ranks: int, choice: Choice) -> Asked:
    """The same with the chosen values."""
    cfg, changed = asked.cfg, asked.cfg.copy()
    for change in changes(configured_choice(asked, ranks), choice):
        value = list(change.new) if isinstance(change.new, tuple) else change.new
        OmegaConf.update(changed, change.key, value, force_add=True)
        if change.key == knobs.MICRO_BATCH:
            changed[ACCUMULATION] = asked.batch(ranks).rows // change.new
        if change.key == knobs.LOSS and value == WHOLE and "num_output_chunks" in cfg.loss:
            changed.loss.pop("num_output_chunks")
        if change.key == FUSED and value and cfg.optimizer.get("foreach"):
            changed.optimizer.pop("foreach")
    return Asked.of(changed, asked.kind.name)


def overrides(before: Config, after: Config) -> list[str]:
    """What turns one config into another on the command line: ``key=value``, and ``~key`` to remove a key."""
    plain: list[Any] = [
        OmegaConf.to_container(cfg) if isinstance(cfg, DictConfig) else cfg
        for cfg in (before, after)
    ]
    return list(_differences(*plain))


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any], block: str = ""
) -> Iterator[str]:
    yield from (f"~{block}{key}" for key in before if key not in after)
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, Mapping):
            inner = old if isinstance(old, Mapping) else {}
            yield from _differences(inner, value, f"{block}{key}.")
        elif key not in before or value != old:
            yield f"{block}{key}={_as_yaml(value)}"


def _as_yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_as_yaml, value))}]"
    return "null" if value is None else str(value)


def _shown(value: Any) -> str:
    """A value as the command line takes it."""
    return f"[{','.join(value)}]" if isinstance(value, (tuple, list)) else str(value)


_ALL_LAYERS_AGAIN = 0.30
# How much longer a step takes, roughly, where nothing better is known: a third of a step is forward, and
# layers are most of it.
_COSTS_OF_VALUES = {
    (knobs.CHECKPOINT, "operations"): 0.08,
    (knobs.RESHARD, True): 0.04,
    (knobs.OFFLOADING, True): 0.15,
    (knobs.RECOMPUTE_LOSS, True): 0.04,
}


def rough_cost(choice: Choice) -> float:
    """Orders choices where no prediction is to be had, from the one that should be fastest."""
    costs = [_COSTS_OF_VALUES.get((key, value), 0.0) for key, value in choice.items()]
    costs.append(_ALL_LAYERS_AGAIN * knobs.checkpointed_share(choice[knobs.CHECKPOINT]))
    # Each micro-batch gathers parameters and launches kernels once more.
    return sum(costs) + 0.05 / choice.get(knobs.MICRO_BATCH, 1)
