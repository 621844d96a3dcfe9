"""What a config and the environment say about the memory of a step: the keys of caches."""

from __future__ import annotations

import os
from typing import Any

from omegaconf import DictConfig, OmegaConf

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
