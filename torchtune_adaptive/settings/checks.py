"""What cannot work together stops here, before any model is built.

``check`` looks at the keys that the recipes share with torchtune, and at what this package's settings mean
beside them.
"""

from __future__ import annotations

import logging
import re

from omegaconf import DictConfig

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.settings.adaptive import BLOCK, AdaptiveSettings, optional, whole_number
from torchtune_adaptive.settings.kinds import Kind, unused_keys

log = logging.getLogger(__name__)


def check(cfg: DictConfig, recipe: Kind) -> AdaptiveSettings:
    """Everything that can be wrong in a config and be seen before a model is built.

    Args:
        cfg: the whole config.
        recipe: the kind of recipe that it is for, ``full`` or ``lora``.
    """
    if ignored := unused_keys(cfg, recipe):
        log.warning(f"Not used by this recipe: {', '.join(ignored)}")
    settings = AdaptiveSettings.from_config(cfg)
    check_recipe_config(cfg, recipe)
    check_adaptive_config(cfg, settings)
    return settings


def check_recipe_config(cfg: DictConfig, recipe: Kind) -> None:
    """Stop at what cannot work in torchtune's own keys."""
    for key, minimum in (("batch_size", 1), ("gradient_accumulation_steps", 1), ("epochs", 0)):
        whole_number(minimum)(key, cfg.get(key))
    optional(whole_number(1))("max_steps_per_epoch", cfg.get("max_steps_per_epoch"))
    _check_dtype(cfg)
    _check_activation_memory(cfg)
    _check_collate(cfg)
    if cfg.get("fsdp_cpu_offload", False) and cfg.device == "cpu":
        raise ConfigError(
            "fsdp_cpu_offload",
            True,
            "moves parameters between an accelerator and the CPU, and device is cpu",
            "Set fsdp_cpu_offload=False, or train on an accelerator",
        )
    if recipe == "full":
        _check_optimizer_in_backward(cfg)
        _check_tensor_parallel(cfg)
    elif cfg.get("optimizer_in_bwd", False):
        raise ConfigError(
            "optimizer_in_bwd",
            True,
            "is not available in the LoRA recipe",
            "Remove it: adapters have little optimizer state to save",
        )


def check_adaptive_config(cfg: DictConfig, settings: AdaptiveSettings) -> None:
    """Stop at what cannot work together with adaptive batching."""
    _check_growth(cfg, settings)
    if settings.search_only and not settings.use_maximum_batch_size:
        raise ConfigError(
            f"{BLOCK}.search_only",
            True,
            "has nothing to search for",
            "Set use_maximum_batch_size=True as well",
        )
    if settings.shrinks and cfg.get("optimizer_in_bwd", False):
        raise ConfigError(
            f"{BLOCK}.on_out_of_memory",
            "shrink",
            "takes a step again, and with optimizer_in_bwd a step has changed parameters before it is over",
            "Set it to raise, or set optimizer_in_bwd=False",
        )
    if settings.survives and cfg.get("tensor_parallel_dim", 1) > 1:
        raise ConfigError(
            "tensor_parallel_dim",
            cfg.tensor_parallel_dim,
            "cannot be combined with use_maximum_batch_size, growth or shrink: a rank that runs out of "
            "memory finishes the step's collectives in the others' place, and can do so for FSDP's only",
            "Set tensor_parallel_dim=1, or use_maximum_batch_size=False, batch_increase_function=null, "
            f"{BLOCK}.on_out_of_memory=raise, and choose batch_size yourself",
        )
    if not settings.use_maximum_batch_size:
        return
    if settings.keep_global_batch and cfg.get("optimizer_in_bwd", False):
        raise ConfigError(
            f"{BLOCK}.keep_global_batch",
            True,
            "needs gradient accumulation, and with optimizer_in_bwd there is none",
            "Set one of the two to False",
        )


def _check_growth(cfg: DictConfig, settings: AdaptiveSettings) -> None:
    in_backward = cfg.get("optimizer_in_bwd", False)
    if settings.budgets and in_backward:
        raise ConfigError(
            f"{BLOCK}.token_budget",
            settings.token_budget,
            "makes several micro-batches of a step, and with optimizer_in_bwd there can be one only",
            "Set it to False, or set optimizer_in_bwd=False",
        )
    if settings.budgets and settings.use_maximum_batch_size:
        raise ConfigError(
            f"{BLOCK}.token_budget",
            settings.token_budget,
            "fills the memory without changing the rows in a step, and use_maximum_batch_size changes them",
            "Set one of the two to False",
        )
    if settings.grow_past_memory and in_backward:
        raise ConfigError(
            f"{BLOCK}.grow_past_memory",
            True,
            "needs gradient accumulation, and with optimizer_in_bwd there is none",
            "Set one of the two to False",
        )
    if settings.gradient_noise != "off" and in_backward:
        raise ConfigError(
            f"{BLOCK}.gradient_noise",
            settings.gradient_noise,
            "needs the gradients of a whole step, and with optimizer_in_bwd they never exist together",
            "Set it to off, or set optimizer_in_bwd=False",
        )
    if settings.gradient_noise == "act" and cfg.get("batch_increase_function") is not None:
        raise ConfigError(
            f"{BLOCK}.gradient_noise",
            "act",
            "decides about the batch, and so does batch_increase_function",
            "Set it to observe, or batch_increase_function=null",
        )
    if settings.lr_scaling == "gain" and settings.gradient_noise == "off":
        raise ConfigError(
            f"{BLOCK}.lr_scaling",
            "gain",
            "is computed from the gradient noise scale, which is not measured",
            f"Set {BLOCK}.gradient_noise=observe, or another rule",
        )
    if settings.beta2 == "half_life" and not re.search(
        r"^torch\.optim\.Adam(W)?$", cfg.optimizer.get("_component_", "")
    ):
        raise ConfigError(
            f"{BLOCK}.beta2",
            "half_life",
            "corrects the second moment of torch's Adam, which the optimizer is not "
            f"({cfg.optimizer.get('_component_')})",
            "Use torch.optim.AdamW or torch.optim.Adam, or set it to fixed",
        )
    steps = cfg.get("save_every_n_steps")
    optional(whole_number(1))("save_every_n_steps", steps)
    optional(whole_number(1))("keep_last_n_checkpoints", cfg.get("keep_last_n_checkpoints"))
    if steps is not None and cfg.get("enable_async_checkpointing", False):
        raise ConfigError(
            "save_every_n_steps",
            steps,
            "cannot be asynchronous: torchtune finds asynchronous checkpoints by their epoch",
            "Set enable_async_checkpointing=False, or save_every_n_steps=null",
        )


def _check_dtype(cfg: DictConfig) -> None:
    if cfg.dtype not in ("bf16", "fp32", "fp64"):
        raise ConfigError(
            "dtype",
            cfg.dtype,
            "cannot be trained in: fp16 needs loss scaling, which these recipes do not have",
            "Use bf16 or fp32",
        )


def _check_activation_memory(cfg: DictConfig) -> None:
    if not cfg.get("enable_activation_offloading", False):
        return
    if cfg.device != "cuda":
        raise ConfigError(
            "enable_activation_offloading",
            True,
            f"needs a CUDA device, and device is {cfg.device}",
            "Set enable_activation_offloading=False",
        )
    if not cfg.get("enable_activation_checkpointing", False):
        raise ConfigError(
            "enable_activation_offloading",
            True,
            "works only together with activation checkpointing",
            "Set enable_activation_checkpointing=True as well",
        )


def _check_collate(cfg: DictConfig) -> None:
    if "left_pad_sequence" in (cfg.get("collate_fn") or ""):
        raise ConfigError(
            "collate_fn",
            cfg.collate_fn,
            "pads on the left, which is for generation only",
            "Use torchtune.data.padded_collate_sft",
        )


def _check_optimizer_in_backward(cfg: DictConfig) -> None:
    if not cfg.get("optimizer_in_bwd", False):
        return
    if cfg.get("clip_grad_norm") is not None:
        raise ConfigError(
            "clip_grad_norm",
            cfg.clip_grad_norm,
            "needs all gradients at once, and with optimizer_in_bwd they never exist together",
            "Set clip_grad_norm=None, or optimizer_in_bwd=False",
        )
    if cfg.gradient_accumulation_steps > 1:
        raise ConfigError(
            "gradient_accumulation_steps",
            cfg.gradient_accumulation_steps,
            "cannot accumulate: with optimizer_in_bwd every backward pass is an optimizer step",
            "Set gradient_accumulation_steps=1, or optimizer_in_bwd=False",
        )


def _check_tensor_parallel(cfg: DictConfig) -> None:
    dim = cfg.get("tensor_parallel_dim", 1)
    whole_number(1)("tensor_parallel_dim", dim)
    if dim == 1:
        return
    if cfg.get("tensor_parallel_plan") is None:
        raise ConfigError(
            "tensor_parallel_dim",
            dim,
            "needs to know how to split the model",
            "Set tensor_parallel_plan, or tensor_parallel_dim=1",
        )
    if cfg.optimizer.get("fused", False):
        raise ConfigError(
            "optimizer.fused",
            True,
            "does not work with tensor parallelism",
            "Set optimizer.fused=False",
        )
