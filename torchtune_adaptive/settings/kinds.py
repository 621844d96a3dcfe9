"""The kinds of recipe: the config keys that each knows, and which kind a config is for."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Literal

from omegaconf import DictConfig, ListConfig, OmegaConf

from torchtune_adaptive.errors import ConfigError

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
        "use_maximum_batch_size",
        "batch_increase_function",
        "adaptive_batching",
        "save_every_n_steps",
        "keep_last_n_checkpoints",
    ]
)

_RECIPE_KEYS: dict[Kind, frozenset[str]] = {
    "full": _COMMON_KEYS
    | {"optimizer_in_bwd", "ac_mode", "ac_option", "enable_async_checkpointing"}
    | {"tensor_parallel_dim", "tensor_parallel_plan"},
    "lora": _COMMON_KEYS | {"save_adapter_weights_only"},
}


def kind_of(cfg: DictConfig) -> Kind:
    """The kind of recipe that a config is for, by what its model takes."""
    return "lora" if "lora_attn_modules" in cfg.model else "full"


def is_packed(cfg: DictConfig) -> bool:
    """Whether rows are packed; a list of datasets is if all of them are, for torchtune takes no mixture."""
    datasets = cfg.get("dataset") or {}
    if not isinstance(datasets, ListConfig):
        return bool(datasets.get("packed", False))
    return bool(datasets) and all(one.get("packed", False) for one in datasets)


def unused_keys(cfg: DictConfig, recipe: Kind) -> list[str]:
    """Top-level keys that the recipe would ignore; raises if one looks like a misspelt key.

    A key that other values refer to (``${max_seq_len}``) is a variable and is never reported.
    """
    known = _RECIPE_KEYS[recipe]
    every_known = frozenset().union(*_RECIPE_KEYS.values())
    text = OmegaConf.to_yaml(cfg, resolve=False)
    unused = []
    for key in map(str, cfg):
        if key in known or re.search(r"\$\{" + re.escape(key) + r"[}.\[]", text):
            continue
        if key not in every_known and (close := get_close_matches(key, known, n=1, cutoff=0.87)):
            raise ConfigError(
                key,
                plain_value(cfg, key),
                f"is not a key of this recipe, and looks like {close[0]}",
                f"Write {close[0]}, or remove it (~{key} on the command line)",
            )
        unused.append(key)
    return unused


def plain_value(cfg: DictConfig, key: str) -> object:
    value = cfg[key]
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
