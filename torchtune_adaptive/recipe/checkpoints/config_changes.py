"""What a resumed run takes from its config, and what from its checkpoint, where the two differ.

Pure functions of two configs: the one that the checkpoint was saved with, and the one that resumes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import CheckpointError
from torchtune_adaptive.recipe.settings.adaptive import BLOCK, keys_with, top_level_keys
from torchtune_adaptive.recipe.settings.keys import KEYS, KEYS_OF_BLOCKS
from torchtune_adaptive.recipe.settings.kind_table import Kind
from torchtune_adaptive.recipe.settings.knob_table import ACCUMULATION
from torchtune_adaptive.recipe.settings.secrets import facts_of, is_fact_of, shown

FlatConfig = dict[str, Any]
"""Values by the paths of their keys."""

BEGIN_ANEW = "or train on from the checkpoint's weights (checkpointer.checkpoint_dir) with another output_dir"

SAMPLE_ORDER = f"{BLOCK}.sample_order"
_RATE = "optimizer.lr"
_OPTIMIZER = "optimizer._component_"
_IN_BACKWARD = "optimizer_in_bwd"


def batch_keys(kind: Kind) -> tuple[str, ...]:
    """The keys of a batch that a run may decide on itself."""
    return (ACCUMULATION,) if kind.generates else ("batch_size", ACCUMULATION)  # or it is prompts


def training_config(cfg: DictConfig, kind: Kind) -> FlatConfig:
    """What of a config decides about the result of a training."""
    values = facts_of(cfg)
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    ours, block = keys_with("result"), plain.get(BLOCK) or {}  # what a run follows is no secret
    relevant = {key for key, row in KEYS.items() if row.result} | (ours & top_level_keys())
    chosen = {k: v for k, v in values.items() if k in kind.keys & relevant}
    chosen[BLOCK] = {key: block.get(key) for key in sorted(ours - top_level_keys())}
    # Weights that are not trained are read again.
    frozen = [each.checkpointer for each in kind.frozen] + ["checkpointer"] * kind.adapters
    for key in frozen:
        of_block, rows = values.get(key) or {}, KEYS_OF_BLOCKS[key]
        chosen[key] = {name: of_block.get(name) for name, row in rows.items() if row.result}
    return dict(_flat(chosen))


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        path = f"{above}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{path}.")
        elif isinstance(value, list) and all(isinstance(one, dict) for one in value):
            for number, one in enumerate(value):
                yield from _flat(one, f"{path}[{number}].")
        elif value is not None:
            plain = isinstance(value, (bool, int, float, str))
            yield path, value if plain else str(value)


def change(key: str, old: Any, new: Any, whose: str) -> str:
    """A line about a value that a resumed run does not have from both."""
    old, new = ("unset" if value is None else shown(key, value) for value in (old, new))
    return f"{key} {old} -> {new} (the {whose})"


def require_same_optimizer(saved: FlatConfig, now: FlatConfig) -> None:
    """Raise unless the optimizer can use the state that was saved.

    Raises:
        CheckpointError: naming the key.
    """
    for key in (_OPTIMIZER, _IN_BACKWARD):
        old, new = saved.get(key, False), now.get(key, False)
        if old != new:
            raise CheckpointError(
                f"{key}: {new} cannot continue with the optimizer state of a checkpoint that was saved with "
                f"{old}. Set {key}={old}, {BEGIN_ANEW}."
            )


@dataclass(frozen=True)
class Resumed:
    """A config as a resumed run follows it."""

    config: FlatConfig
    changes: list[str]
    """A line for each value that has changed, which says whether it is the config's or the checkpoint's."""
    kept: FlatConfig
    """The values of these that are the checkpoint's; None where it has none."""


def resumed(
    saved: FlatConfig, now: FlatConfig, *, keeps: Collection[str] = (), takes_rate: bool = False
) -> Resumed:
    """The config that a resumed run follows.

    Args:
        keeps: the keys whose values the run decided on when it began.
        takes_rate: whether the learning rate is the config's.
    """
    changes: list[str] = []
    kept: FlatConfig = {}
    for key in sorted(saved.keys() | now.keys()):
        old, new = saved.get(key), now.get(key)
        if old == new or is_fact_of(old, new) or is_fact_of(new, old):
            continue
        is_kept = (
            key in ("shuffle", SAMPLE_ORDER)  # the place in an epoch is one in its order
            or key in keeps
            # An optimizer's state has its hyperparameters in it.
            or (key.startswith("optimizer.") and not (key == _RATE and takes_rate))
        )
        if not is_kept:
            changes.append(change(key, old, new, "config's"))
            continue
        kept[key] = old
        remedy = f"; {BLOCK}.resume_learning_rate=config takes the config's" if key == _RATE else ""
        changes.append(change(key, new, old, f"checkpoint's{remedy}"))
    config = {key: value for key, value in (now | kept).items() if value is not None}
    return Resumed(config, changes, kept)
