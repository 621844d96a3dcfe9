"""Stops a run whose config cannot work, before any model is built.

``torchtune_keys`` knows what each of torchtune's keys may be, ``adaptive`` what each of ours may be;
here is what cannot be combined.
"""

from __future__ import annotations

import logging
import re

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.settings.adaptive import BLOCK, AdaptiveSettings
from torchtune_adaptive.settings.kinds import Kind, unused_keys
from torchtune_adaptive.settings.torchtune_keys import check_values

log = logging.getLogger(__name__)


def check(cfg: DictConfig, recipe: Kind) -> AdaptiveSettings:
    """Everything that can be wrong in a config and be seen before a model is built.

    Args:
        cfg: the whole config.
        recipe: the kind of recipe that it is for, ``full`` or ``lora``.

    Raises:
        ConfigError: the config cannot work.
    """
    try:
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        assert isinstance(values, dict)
        if ignored := unused_keys(cfg, recipe):
            log.warning(f"Not used by this recipe: {', '.join(ignored)}")
        settings = AdaptiveSettings.from_config(cfg)
        check_values({str(key): value for key, value in values.items()})
        check_recipe_config(cfg, recipe)
        check_adaptive_config(cfg, settings)
    except OmegaConfBaseException as error:  # a reference to a key that does not exist, for one
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        key = error.full_key or "config"
        raise ConfigError(
            key, error.value, f"cannot be read: {reason}", "Correct it in the config"
        ) from error
    return settings


def check_recipe_config(cfg: DictConfig, recipe: Kind) -> None:
    """Stop at what cannot work together in torchtune's own keys."""
    _check_dtype(cfg)
    _check_activation_memory(cfg)
    _check_collate(cfg)
    if cfg.get("fsdp_cpu_offload", False) and cfg.device == "cpu":
        raise ConfigError(
            "fsdp_cpu_offload",
            True,
            "moves parameters between an accelerator and the CPU, but device is cpu",
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
    if cfg.get("optimizer_in_bwd", False):
        _check_settings_with_optimizer_in_backward(settings)
    _check_decisions(settings)
    _check_beta2(cfg, settings)
    _check_probe_length(cfg, settings)
    if settings.search_only and not settings.use_maximum_batch_size:
        raise ConfigError(
            f"{BLOCK}.search_only",
            True,
            "has nothing to search for",
            "Set use_maximum_batch_size=True as well",
        )
    if settings.survives and (cfg.get("tensor_parallel_dim") or 1) > 1:
        raise ConfigError(
            "tensor_parallel_dim",
            cfg.tensor_parallel_dim,
            "cannot be combined with use_maximum_batch_size, growth or shrink: a rank that runs out of "
            "memory issues the step's remaining collectives, and can do so for FSDP's only",
            "Set tensor_parallel_dim=1, or use_maximum_batch_size=False, batch_increase_function=null, "
            f"{BLOCK}.on_out_of_memory=raise, and choose batch_size yourself",
        )
    if settings.save_every_n_steps and cfg.get("enable_async_checkpointing", False):
        raise ConfigError(
            "save_every_n_steps",
            settings.save_every_n_steps,
            "cannot be asynchronous: torchtune finds asynchronous checkpoints by their epoch",
            "Set enable_async_checkpointing=False, or save_every_n_steps=null",
        )


def _check_settings_with_optimizer_in_backward(settings: AdaptiveSettings) -> None:
    """With the optimizer in backward a step is one micro-batch, and its gradients never exist together."""
    no_accumulation = "needs gradient accumulation, which optimizer_in_bwd does not allow"
    conflicts = {
        "token_budget": (
            settings.budgets,
            "splits a step into several micro-batches, which optimizer_in_bwd does not allow",
        ),
        "grow_past_memory": (settings.grow_past_memory, no_accumulation),
        "keep_global_batch": (
            settings.keep_global_batch and settings.use_maximum_batch_size,
            no_accumulation,
        ),
        "gradient_noise": (
            settings.gradient_noise != "off",
            "needs the gradients of a whole step, which never exist together with optimizer_in_bwd",
        ),
        "on_out_of_memory": (
            settings.shrinks,
            "retries a step, but with optimizer_in_bwd a step changes parameters before it is over",
        ),
    }
    instead = {"gradient_noise": "off", "on_out_of_memory": "raise"}
    for key, (is_set, reason) in conflicts.items():
        if is_set:
            raise ConfigError(
                f"{BLOCK}.{key}",
                getattr(settings, key),
                reason,
                f"Set {key} to {instead.get(key, 'False')}, or set optimizer_in_bwd=False",
            )


def _check_decisions(settings: AdaptiveSettings) -> None:
    """Two settings must not decide about the same thing."""
    if settings.budgets and settings.use_maximum_batch_size:
        raise ConfigError(
            f"{BLOCK}.token_budget",
            settings.token_budget,
            "fills the memory with the same samples in each step, but use_maximum_batch_size changes them",
            "Set one of the two to False",
        )
    if settings.gradient_noise == "act" and settings.batch_increase_function is not None:
        raise ConfigError(
            f"{BLOCK}.gradient_noise",
            "act",
            "decides how the batch grows, and so does batch_increase_function",
            "Set it to observe, or batch_increase_function=null",
        )
    if settings.lr_scaling == "gain" and settings.gradient_noise == "off":
        raise ConfigError(
            f"{BLOCK}.lr_scaling",
            "gain",
            "is computed from the gradient noise scale, which is not measured",
            f"Set {BLOCK}.gradient_noise=observe, or another rule",
        )


def _check_beta2(cfg: DictConfig, settings: AdaptiveSettings) -> None:
    optimizer = cfg.optimizer._component_
    if settings.beta2 == "half_life" and not re.search(r"^torch\.optim\.Adam(W)?$", optimizer):
        raise ConfigError(
            f"{BLOCK}.beta2",
            "half_life",
            f"corrects the second moment of torch's Adam, but the optimizer is {optimizer}",
            "Use torch.optim.AdamW or torch.optim.Adam, or set it to fixed",
        )


def _check_probe_length(cfg: DictConfig, settings: AdaptiveSettings) -> None:
    longest = cfg.model.get("max_seq_len")
    if settings.probe_length and longest and settings.probe_length > longest:
        raise ConfigError(
            f"{BLOCK}.probe_length",
            settings.probe_length,
            f"is longer than the model takes (model.max_seq_len is {longest})",
            f"Set it to {longest} or less",
        )


def _check_dtype(cfg: DictConfig) -> None:
    if cfg.get("dtype") not in ("bf16", "fp32", "fp64"):
        raise ConfigError(
            "dtype",
            cfg.get("dtype"),
            "is not supported (fp16 needs loss scaling, which these recipes do not have)",
            "Use bf16 or fp32",
        )


def _check_activation_memory(cfg: DictConfig) -> None:
    if not cfg.get("enable_activation_offloading", False):
        return
    if cfg.device != "cuda":
        raise ConfigError(
            "enable_activation_offloading",
            True,
            f"needs a CUDA device, but device is {cfg.device}",
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
            "needs all gradients at once, which never exist together with optimizer_in_bwd",
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
