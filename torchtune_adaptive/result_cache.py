"""Remember the sizes that searches found, under everything that could change them."""

from __future__ import annotations

import os
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config import AdaptiveSettings
from torchtune_adaptive.remembered import Remembered, folder_for, libraries

# The keys of a config that decide how much memory a micro-batch takes.
_STEP_KEYS = (
    "model",
    "loss",
    "optimizer",
    "optimizer_in_bwd",
    "clip_grad_norm",
    "dtype",
    "compile",
    "enable_activation_checkpointing",
    "ac_mode",
    "ac_option",
    "enable_activation_offloading",
    "custom_sharded_layers",
    "fsdp_cpu_offload",
    "fsdp_reshard_after_forward",
    "collate_fn",
    "gradient_accumulation_steps",
)
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def step_facts(cfg: DictConfig) -> dict[str, Any]:
    """What a config says about the memory of a step, whatever its size."""
    resolved = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(resolved, dict)
    return {key: resolved.get(key) for key in _STEP_KEYS}


def allocator_facts() -> dict[str, str | None]:
    """How the environment sets up the caching allocator."""
    return {name: os.environ.get(name) for name in _ALLOCATOR_VARIABLES}


def facts(
    cfg: DictConfig,
    settings: AdaptiveSettings,
    *,
    row_length: int,
    packed: bool,
    ranks: int,
    device: str,
    capacity: int,
) -> dict[str, Any]:
    """Everything that could change the result of a search.

    The capacity counts with two digits: it differs by a few pages from run to run, and a result is
    confirmed by a trial before it is used.
    """
    return {
        "config": {**step_facts(cfg), "batch_size": cfg.batch_size},
        "settings": {
            "rounding": settings.rounding,
            "ceiling": settings.ceiling,
            "headroom": settings.headroom,
            "memory_limit": settings.memory_limit,
            "keep_global_batch": settings.keep_global_batch,
        },
        "row_length": row_length,
        "packed": packed,
        "ranks": ranks,
        "device": device,
        "capacity": float(f"{capacity:.2g}"),
        "libraries": libraries(),
        "allocator": allocator_facts(),
    }


def found_sizes(cache: bool | str) -> Remembered[int]:
    """The sizes that searches found, kept where the setting says."""
    return Remembered(
        folder_for(cache, "batch_sizes"), "batch size", lambda n: isinstance(n, int) and n >= 1
    )
