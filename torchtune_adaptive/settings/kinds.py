"""The kinds of recipe: the config keys that each knows, and which kind a config is for."""

from __future__ import annotations

import re
from typing import Literal

from omegaconf import DictConfig, ListConfig, OmegaConf

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.settings.adaptive import (
    BLOCK,
    block_keys,
    close_match,
    plain_value,
    top_level_keys,
)

Kind = Literal["full", "lora"]

_COMMON_KEYS = frozenset(
    [
        "output_dir",
        "log_every_n_steps",
        "log_peak_memory_stats",
        "metric_logger",
        "profiler",
        "device",
        "dtype",
        "seed",
        "cudnn_deterministic_mode",
        "model",
        "tokenizer",
        "checkpointer",
        "resume_from_checkpoint",
        "dataset",
        "shuffle",
        "batch_size",
        "collate_fn",
        "optimizer",
        "lr_scheduler",
        "loss",
        "epochs",
        "max_steps_per_epoch",
        "gradient_accumulation_steps",
        "clip_grad_norm",
        "compile",
        "enable_activation_checkpointing",
        "enable_activation_offloading",
        "custom_sharded_layers",
        "fsdp_cpu_offload",
        "fsdp_reshard_after_forward",
        BLOCK,
        *top_level_keys(),
    ]
)

_RECIPE_KEYS: dict[Kind, frozenset[str]] = {
    "full": _COMMON_KEYS
    | {"optimizer_in_bwd", "ac_mode", "ac_option", "enable_async_checkpointing"}
    | {"tensor_parallel_dim", "tensor_parallel_plan"},
    "lora": _COMMON_KEYS | {"save_adapter_weights_only"},
}


KNOWN_KEYS = frozenset().union(*_RECIPE_KEYS.values())
"""The top-level keys that any recipe knows."""


def kind_of(cfg: DictConfig) -> Kind:
    """The kind of recipe that a config is for, by what its model takes."""
    model = cfg.get("model")
    return "lora" if isinstance(model, DictConfig) and "lora_attn_modules" in model else "full"


def is_packed(cfg: DictConfig) -> bool:
    """Whether samples are packed; a list of datasets is if all of them are (torchtune has no mixture)."""
    datasets = cfg.get("dataset") or {}
    if not isinstance(datasets, ListConfig):
        return bool(datasets.get("packed", False))
    return bool(datasets) and all(one.get("packed", False) for one in datasets)


def unused_keys(cfg: DictConfig, recipe: Kind) -> list[str]:
    """Top-level keys that the recipe ignores.

    A key that other values refer to (``${max_seq_len}``) is a variable and is never reported.

    Raises:
        ConfigError: a key is misspelt, or is one of our settings outside of its block.
    """
    known = _RECIPE_KEYS[recipe]
    text = OmegaConf.to_yaml(cfg, resolve=False)
    unused = []
    for key in map(str, cfg):
        if key in known or re.search(r"\$\{" + re.escape(key) + r"[}.\[]", text):
            continue
        if key.lower() in block_keys():
            name = f"{BLOCK}.{key.lower()}"
            value = plain_value(cfg, key)
            raise ConfigError(
                key, value, "is in the wrong place", f"It belongs in {BLOCK}: {name}={value}"
            )
        if key not in KNOWN_KEYS and (meant := close_match(key, known, cutoff=0.87)):
            raise ConfigError(
                key,
                plain_value(cfg, key),
                f"is set, but the recipe has no such key; it looks like {meant}",
                f"Rename it to {meant}, or remove it (~{key} on the command line)",
            )
        unused.append(key)
    return unused
