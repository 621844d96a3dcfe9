"""What torchtune's own keys may be, as far as it can be seen before a model is built.

torchtune reads most of them without a check, so a wrong value ends a run late and unclearly, or trains
something else than was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.recipe.settings.keys import (
    KEYS,
    KEYS_OF_BLOCKS,
    ROLLOUTS,
    VALUE_CHECKPOINTER,
    Key,
)
from torchtune_adaptive.recipe.settings.kind_table import Kind
from torchtune_adaptive.recipe.settings.mistakes import FIRST, Each
from torchtune_adaptive.recipe.settings.rules import COMPONENT, FOLDER

# Of torchtune's main branch: they change what is trained or how, and these recipes do not know them.
_UNKNOWN_UNLESS: dict[str, Any] = {"enable_fp8_training": False, "resize_token_embeddings": False}


def check_values(cfg: Mapping[str, Any], kind: Kind, each: Each = FIRST) -> None:
    """Raise ``ConfigError``, within ``each``, for a value of a config, which is resolved, that its key may
    not have."""
    for key, row in KEYS.items():
        with each:
            _check_value(cfg, kind, key, row)
    for key, default in _UNKNOWN_UNLESS.items():
        with each:
            if cfg.get(key) not in (None, default):
                raise ConfigError(
                    key,
                    cfg[key],
                    "is not supported by the adaptive recipes",
                    f"Set {key}={default}, or use torchtune's recipe",
                )
    _check_datasets(cfg, each)
    for block, rows in KEYS_OF_BLOCKS.items():
        for name, node in blocks(cfg, block):
            for key, row in rows.items():
                with each:
                    if row.rule and isinstance(node, Mapping) and node.get(key) is not None:
                        row.rule.read(f"{name}.{key}", node[key])
    for key in ("checkpointer", VALUE_CHECKPOINTER):
        if key in kind.keys and isinstance(made := cfg.get(key), Mapping):
            with each:
                FOLDER.read(f"{key}.output_dir", made.get("output_dir"))


def _check_value(cfg: Mapping[str, Any], kind: Kind, key: str, row: Key) -> None:
    value = cfg.get(key)
    if key == "batch_size" and isinstance(value, str):
        raise ConfigError(
            "batch_size",
            value,
            "is not valid",
            "Must be an integer >= 1; to search for the largest that fits, set "
            "use_maximum_batch_size=True and leave batch_size a number",
        )
    if kind.name in row.given and key not in cfg:
        raise ConfigError(key, None, "is missing", f"Add {key}; it may be null")
    is_null = value is None and (row.nullable or key not in cfg)
    if row.rule and (kind.name in row.needed or (not is_null and _is_read(row, kind))):
        row.rule.read(key, value)


def _is_read(row: Key, kind: Kind) -> bool:
    """Whether a value is looked at that need not be there. One of another kind's keys is as well: it may be a
    mistake. But what only rollouts have (``temperature``) may be a variable in other configs."""
    if kind.name in row.kinds:
        return True
    return not row.needed and (kind.generates or not row.kinds <= ROLLOUTS)


def _check_datasets(cfg: Mapping[str, Any], each: Each) -> None:
    for key in ("dataset", "dataset_val"):
        found = list(blocks(cfg, key))
        if not found and (key == "dataset" or cfg.get(key)):
            found = [(key, cfg.get(key))]
        for name, node in found:
            with each:
                COMPONENT.read(name, node)
    with each:
        if cfg.get("run_val_every_n_steps") is not None and not cfg.get("dataset_val"):
            raise ConfigError(
                "run_val_every_n_steps",
                cfg["run_val_every_n_steps"],
                "has nothing to validate on: dataset_val is not set",
                "Set dataset_val, or run_val_every_n_steps=null",
            )


def blocks(cfg: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    """The block of a key, or those in its list, with their names."""
    node = cfg.get(key)
    if isinstance(node, dict):
        yield key, node
    elif isinstance(node, list):
        yield from ((f"{key}[{n}]", one) for n, one in enumerate(node))
