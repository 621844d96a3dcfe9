"""Stops a run whose config cannot work, before any model is built.

``torchtune_keys`` knows what each of torchtune's keys may be, ``adaptive`` what each of ours may be;
here is what cannot be combined.
"""

from __future__ import annotations

import logging
import re
from importlib.util import find_spec

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.core import CHECKPOINT, CHUNKED, RECOMPUTE_LOSS, Choice
from torchtune_adaptive.recipe.settings.adaptive import BLOCK, AdaptiveSettings
from torchtune_adaptive.recipe.settings.kinds import (
    Kind,
    has_images,
    is_packed,
    require_own,
    unused_keys,
)
from torchtune_adaptive.recipe.settings.knob_table import KNOBS_BY_KEY, configured_checkpoint
from torchtune_adaptive.recipe.settings.torchtune_keys import check_values

log = logging.getLogger(__name__)


def check(cfg: DictConfig, kind: Kind) -> AdaptiveSettings:
    """Everything that can be wrong in a config and be seen before a model is built.

    Args:
        cfg: the whole config.
        kind: of the recipe that will run it.

    Raises:
        ConfigError: the config cannot work.
    """
    try:
        require_own(cfg, kind)
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        assert isinstance(values, dict)
        if ignored := unused_keys(cfg, kind):
            log.warning(f"Not used by this recipe: {', '.join(ignored)}")
        settings = AdaptiveSettings.from_config(cfg)
        blocks = [key for each in kind.frozen for key in (each.model, each.checkpointer)]
        blocks += sorted(kind.more_blocks)
        check_values({str(key): value for key, value in values.items()}, blocks)
        check_recipe_config(cfg, kind)
        check_adaptive_config(cfg, settings)
        _check_pairs(cfg, kind, settings)
    except OmegaConfBaseException as error:  # a reference to a key that does not exist, for one
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        key = error.full_key or "config"
        raise ConfigError(
            key, error.value, f"cannot be read: {reason}", "Correct it in the config"
        ) from error
    return settings


def check_recipe_config(cfg: DictConfig, kind: Kind) -> None:
    """Stop at what cannot work together in torchtune's own keys."""
    _check_dtype(cfg)
    _check_activation_memory(cfg)
    _check_recomputation(cfg)
    _check_collate(cfg)
    _check_streaming(cfg)
    if cfg.get("fsdp_cpu_offload", False) and cfg.device == "cpu":
        raise ConfigError(
            "fsdp_cpu_offload",
            True,
            "moves parameters between an accelerator and the CPU, but device is cpu",
            "Set fsdp_cpu_offload=False, or train on an accelerator",
        )
    if "quantizer" in kind.more_blocks and cfg.get("compile", False):
        raise ConfigError(
            "compile",
            True,
            "cannot be combined with quantisation-aware training, as in torchtune",
            "Set compile=False",
        )
    if "optimizer_in_bwd" in kind.keys:
        _check_optimizer_in_backward(cfg)
    elif cfg.get("optimizer_in_bwd", False):
        raise ConfigError(
            "optimizer_in_bwd",
            True,
            f"is not available in {kind.recipe}",
            "Remove it: adapters have little optimizer state to save",
        )
    if "tensor_parallel_dim" in kind.keys:
        _check_tensor_parallel(cfg)
    elif not kind.adapters and (cfg.get("tensor_parallel_dim") or 1) > 1:
        raise ConfigError(
            "tensor_parallel_dim",
            cfg.tensor_parallel_dim,
            f"is not available in {kind.recipe}",
            "Remove it",
        )


def check_adaptive_config(cfg: DictConfig, settings: AdaptiveSettings) -> None:
    """Stop at what cannot work together with adaptive batching."""
    if cfg.get("optimizer_in_bwd", False):
        _check_settings_with_optimizer_in_backward(settings)
    _check_decisions(settings)
    _check_beta2(cfg, settings)
    _check_probe_length(cfg, settings)
    if settings.budgets and has_images(cfg):
        raise token_budget_with_images(settings)
    _check_fastest(cfg, settings)
    searches = settings.use_maximum_batch_size or settings.use_fastest_configuration
    if settings.search_only and not searches:
        raise ConfigError(
            f"{BLOCK}.search_only",
            True,
            "has nothing to search for",
            "Set use_maximum_batch_size=True or use_fastest_configuration=True as well",
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


def _check_pairs(cfg: DictConfig, kind: Kind, settings: AdaptiveSettings) -> None:
    """What a sample of two rows cannot be combined with."""
    if kind.sample == "row":
        return
    if settings.budgets:
        raise ConfigError(
            f"{BLOCK}.token_budget",
            settings.token_budget,
            "counts tokens of single rows, but a sample of this recipe is a pair, and its loss is a mean "
            "over pairs",
            "Set it to False, and use_maximum_batch_size=True to have the number of pairs found",
        )
    if is_packed(cfg):
        raise ConfigError(
            "dataset.packed", True, "packs single rows, but a sample is a pair", "Set it to False"
        )


def require_torchvision(cfg: DictConfig) -> None:
    """Stop where images are to be trained on without the library that torchtune takes them with.

    Raises:
        ConfigError: it is not installed.
    """
    if has_images(cfg) and find_spec("torchvision") is None:
        raise ConfigError(
            "collate_fn",
            cfg.collate_fn,
            "makes batches of images, for which torchtune needs torchvision, and that is not installed",
            "Install torchvision, in the version for your torch",
        )


def token_budget_with_images(settings: AdaptiveSettings) -> ConfigError:
    return ConfigError(
        f"{BLOCK}.token_budget",
        settings.token_budget,
        "sizes micro-batches by their text, but these samples have images: a micro-batch is padded to the "
        "most images and tiles of any of its samples, so how many samples fit does not depend on text alone",
        "Set it to False; use_maximum_batch_size=True accounts for images",
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


def _check_fastest(cfg: DictConfig, settings: AdaptiveSettings) -> None:
    """The fastest configuration is that of one batch, and is found by trying it on the run's own model."""
    keys = settings.may_change if isinstance(settings.may_change, tuple) else ()
    for key in keys:
        if key not in KNOBS_BY_KEY:
            raise ConfigError(
                f"{BLOCK}.may_change",
                key,
                "is not a knob that trades memory for speed",
                f"Use exact, rounding, or a list of {', '.join(KNOBS_BY_KEY)}",
            )
    if not settings.use_fastest_configuration:
        return
    others = {
        "use_maximum_batch_size": settings.use_maximum_batch_size,
        "batch_increase_function": settings.batch_increase_function is not None,
        f"{BLOCK}.token_budget": settings.budgets,
        f"{BLOCK}.gradient_noise=act": settings.gradient_noise == "act",
    }
    for other, is_set in others.items():
        if is_set:
            raise ConfigError(
                "use_fastest_configuration",
                True,
                f"looks for the fastest way to train the configured batch, and {other} changes the batch",
                "Set one of the two to False",
            )
    for key in keys:
        if not KNOBS_BY_KEY[key].switch:
            raise ConfigError(
                f"{BLOCK}.may_change",
                key,
                "cannot be changed on a model that is already built",
                "Let tune-adaptive plan --fastest choose it, or leave it out",
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
    if Choice({CHECKPOINT: configured_checkpoint(cfg)}).checkpoints_every is None:
        raise ConfigError(
            "enable_activation_offloading",
            True,
            "works only together with the checkpointing of whole layers",
            "Set enable_activation_checkpointing=True as well",
        )


def _check_recomputation(cfg: DictConfig) -> None:
    """What is computed again in backward."""
    if configured_checkpoint(cfg) == "operations" and cfg.get("compile", False):
        raise ConfigError(
            CHECKPOINT,
            "operations",
            "keeps the results of single operations, which compile=True fuses",
            f"Set {CHECKPOINT} to all or every_2, or compile=False",
        )
    if OmegaConf.select(cfg, RECOMPUTE_LOSS) and cfg.loss._component_ != CHUNKED:
        raise ConfigError(
            RECOMPUTE_LOSS,
            True,
            f"computes the chunks of a loss again, but loss is {cfg.loss._component_}",
            f"Set loss._component_={CHUNKED}, or {RECOMPUTE_LOSS}=False",
        )


def _check_collate(cfg: DictConfig) -> None:
    if "left_pad_sequence" in (cfg.get("collate_fn") or ""):
        raise ConfigError(
            "collate_fn",
            cfg.collate_fn,
            "pads on the left, which is for generation only",
            "Use torchtune.data.padded_collate_sft",
        )


def _check_streaming(cfg: DictConfig) -> None:
    datasets = cfg.dataset if isinstance(cfg.dataset, ListConfig) else [cfg.dataset]
    if any(dataset.get("streaming", False) for dataset in datasets):
        raise ConfigError(
            "dataset.streaming",
            True,
            "gives rows one after the other, but epochs and batches are made of rows by their number",
            "Set dataset.streaming=False",
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
