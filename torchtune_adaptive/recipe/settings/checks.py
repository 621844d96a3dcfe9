"""Stops a run whose config cannot work, before any model is built.

``torchtune_keys`` knows what each of torchtune's keys may be, ``adaptive`` what each of ours may be;
here is what cannot be combined.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_adaptive.common import ConfigError, launcher
from torchtune_adaptive.core import Choice, knobs
from torchtune_adaptive.recipe.settings.adaptive import BLOCK, AdaptiveSettings
from torchtune_adaptive.recipe.settings.kind_table import (
    COPIES,
    Kind,
    about_unused,
    has_images,
    is_packed,
    require_own,
    unused_keys,
)
from torchtune_adaptive.recipe.settings.knob_table import (
    ACCUMULATION,
    KNOBS_BY_KEY,
    configured_accumulation,
    configured_checkpoint,
)
from torchtune_adaptive.recipe.settings.torchtune_keys import check_values

log = logging.getLogger(__name__)
Conflict = tuple[object, str, str, str]
"""Whether there is one, the key that it is reported for, the reason and the remedy."""


def check(cfg: DictConfig, kind: Kind) -> AdaptiveSettings:
    """Everything that can be wrong in a config and be seen before a model is built.

    Args:
        cfg: the whole config.
        kind: the kind of the recipe that will run it.

    Raises:
        ConfigError: the config cannot work.
    """
    try:
        require_own(cfg, kind)
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        assert isinstance(values, dict)
        unused_keys(cfg, kind)  # raises where one is misspelled
        settings = AdaptiveSettings.from_config(cfg)
        blocks = [key for each in kind.frozen for key in (each.model, each.checkpointer)]
        blocks += sorted(kind.more_blocks)
        by_key = {str(key): value for key, value in values.items()}
        check_values(by_key, kind, blocks)
        for there_is, key, reason, remedy in _conflicts(cfg, kind, settings):
            if there_is:
                raise ConfigError(key, _value(cfg, settings, key), reason, remedy)
        _require_rows_by_number(cfg)
        _require_knobs(settings)
        if settings.budgets and has_images(cfg):
            raise token_budget_with_images(settings)
        _check_pairs(cfg, kind, settings)
    except OmegaConfBaseException as error:  # a reference to a key that does not exist, for one
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        key, value = _unreadable(cfg, error)
        if "torchvision" in reason:
            raise missing_torchvision(key, value, error) from error
        raise ConfigError(
            key, value, f"cannot be read: {reason}", "Correct it in the config"
        ) from error
    return settings


def warn_of_unused_keys(cfg: DictConfig, kind: Kind) -> None:
    """Say, once, which keys of a config change nothing."""
    if launcher.rank() == 0:
        for key in unused_keys(cfg, kind):
            log.warning(about_unused(key, kind))


def _unreadable(cfg: DictConfig, error: OmegaConfBaseException) -> tuple[str, object]:
    """The key whose value cannot be read, and the value as it is written."""
    value: Any = OmegaConf.to_container(cfg)
    if not error.full_key:  # as for a whole block that refers to nothing
        try:
            OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as found:
            error = found
    for name in re.findall(r"[^.\[\]]+", error.full_key or ""):
        value = value[int(name)] if isinstance(value, list) else value.get(name)
    return error.full_key or "config", value if error.full_key else None


def _conflicts(cfg: DictConfig, kind: Kind, settings: AdaptiveSettings) -> Iterator[Conflict]:
    yield from _conflicts_of_memory(cfg)
    yield from _conflicts_of_recipe(cfg, kind)
    yield from _conflicts_of_meshes(cfg, kind)
    if cfg.get("optimizer_in_bwd", False):
        yield from _conflicts_with_optimizer_in_backward(settings)
    yield from _conflicts_of_decisions(kind, settings)
    yield from _conflicts_with_config(cfg, settings)
    if kind.generates:
        yield from _conflicts_of_rollouts(cfg, settings)
    if kind.name == "ppo":
        yield from _conflicts_of_ppo(cfg)


def _value(cfg: DictConfig, settings: AdaptiveSettings, key: str) -> object:
    """What a key of ours, or of torchtune, is set to."""
    if key in KNOBS_BY_KEY:
        return KNOBS_BY_KEY[key].configured(cfg)
    name = key.removeprefix(f"{BLOCK}.")
    return getattr(settings, name) if hasattr(settings, name) else OmegaConf.select(cfg, key)


# --- torchtune's own keys -------------------------------------------------------------------------


def _conflicts_of_memory(cfg: DictConfig) -> Iterator[Conflict]:
    """What is kept of activations, in which precision, and where."""
    yield (
        cfg.get("dtype") not in ("bf16", "fp32", "fp64"),
        "dtype",
        "is not supported (fp16 needs loss scaling, which these recipes do not have)",
        "Use bf16 or fp32",
    )
    checkpoint, loss = configured_checkpoint(cfg), OmegaConf.select(cfg, knobs.LOSS)
    offloads = cfg.get(knobs.OFFLOADING, False)
    yield (
        offloads and cfg.device != "cuda",
        knobs.OFFLOADING,
        f"needs a CUDA device, but device is {cfg.device}",
        "Set enable_activation_offloading=False",
    )
    yield (
        offloads and has_images(cfg),
        knobs.OFFLOADING,
        "does not work with images in torchtune",
        "Set enable_activation_offloading=False",
    )
    yield (
        offloads and Choice({knobs.CHECKPOINT: checkpoint}).checkpoints_every is None,
        knobs.OFFLOADING,
        "works only together with the checkpointing of whole layers",
        "Set enable_activation_checkpointing=True as well",
    )
    yield (
        checkpoint == "operations" and cfg.get(knobs.COMPILE, False),
        knobs.CHECKPOINT,
        "keeps the results of single operations, which compile=True fuses",
        f"Set {knobs.CHECKPOINT} to all or every_2, or compile=False",
    )
    yield (
        OmegaConf.select(cfg, knobs.RECOMPUTE_LOSS) and loss != knobs.CHUNKED,
        knobs.RECOMPUTE_LOSS,
        f"computes the chunks of a loss again, but loss is {loss}",
        f"Set loss._component_={knobs.CHUNKED}, or {knobs.RECOMPUTE_LOSS}=False",
    )
    yield (
        cfg.get("fsdp_cpu_offload", False) and cfg.device == "cpu",
        "fsdp_cpu_offload",
        "moves parameters between an accelerator and the CPU, but device is cpu",
        "Set fsdp_cpu_offload=False, or train on an accelerator",
    )


def _conflicts_of_recipe(cfg: DictConfig, kind: Kind) -> Iterator[Conflict]:
    """What this kind of recipe cannot do."""
    yield (
        "left_pad_sequence" in (cfg.get("collate_fn") or ""),
        "collate_fn",
        "pads on the left, which is for generation only",
        "Use torchtune.data.padded_collate_sft",
    )
    yield (
        "quantizer" in kind.more_blocks and cfg.get(knobs.COMPILE, False),
        knobs.COMPILE,
        "cannot be combined with quantization-aware training, as in torchtune",
        "Set compile=False",
    )
    in_backward = cfg.get("optimizer_in_bwd", False)
    yield (
        in_backward and "optimizer_in_bwd" not in kind.keys,
        "optimizer_in_bwd",
        f"is not available in {kind.recipe}",
        "Remove it" + (": adapters have little optimizer state to save" if kind.adapters else ""),
    )
    yield (
        in_backward and cfg.get("clip_grad_norm") is not None,
        "clip_grad_norm",
        "needs all gradients at once, which never exist together with optimizer_in_bwd",
        "Set clip_grad_norm=None, or optimizer_in_bwd=False",
    )
    yield (
        in_backward and configured_accumulation(cfg) > 1,
        ACCUMULATION,
        "cannot accumulate: with optimizer_in_bwd every backward pass is an optimizer step",
        "Set gradient_accumulation_steps=1, or optimizer_in_bwd=False",
    )


def _conflicts_of_meshes(cfg: DictConfig, kind: Kind) -> Iterator[Conflict]:
    dim, known = cfg.get("tensor_parallel_dim", 1), "tensor_parallel_dim" in kind.keys
    yield (
        not known and not kind.adapters and (dim or 1) > 1,
        "tensor_parallel_dim",
        f"is not available in {kind.recipe}",
        "Remove it",
    )
    yield (
        COPIES not in kind.keys and (cfg.get(COPIES) or 1) > 1,
        COPIES,
        f"is not available in {kind.recipe}",
        f"Set {COPIES}=1",
    )
    yield (
        known and dim != 1 and cfg.get("tensor_parallel_plan") is None,
        "tensor_parallel_dim",
        "needs to know how to split the model",
        "Set tensor_parallel_plan, or tensor_parallel_dim=1",
    )
    yield (
        known and dim != 1 and cfg.optimizer.get("fused", False),
        "optimizer.fused",
        "does not work with tensor parallelism",
        "Set optimizer.fused=False",
    )


def _require_rows_by_number(cfg: DictConfig) -> None:
    datasets = cfg.dataset if isinstance(cfg.dataset, ListConfig) else [cfg.dataset]
    if any(dataset.get("streaming", False) for dataset in datasets):
        raise ConfigError(
            "dataset.streaming",
            True,
            "gives rows one after the other, but epochs and batches are made of rows by their number",
            "Set dataset.streaming=False",
        )


# --- adaptive batching ----------------------------------------------------------------------------


def _conflicts_with_optimizer_in_backward(settings: AdaptiveSettings) -> Iterator[Conflict]:
    """Settings that a step with the optimizer in backward cannot have: it is one micro-batch, without all
    gradients at once."""
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
        remedy = f"Set {key} to {instead.get(key, 'False')}, or set optimizer_in_bwd=False"
        yield is_set, f"{BLOCK}.{key}", reason, remedy


def _conflicts_of_decisions(kind: Kind, settings: AdaptiveSettings) -> Iterator[Conflict]:
    """Two settings must not decide about the same thing."""
    yield (
        settings.budgets and settings.use_maximum_batch_size and not kind.generates,
        f"{BLOCK}.token_budget",
        "fills the memory with the same samples in each step, but use_maximum_batch_size changes them",
        "Set one of the two to False",
    )
    yield (
        settings.gradient_noise == "act" and settings.batch_increase_function is not None,
        f"{BLOCK}.gradient_noise",
        "decides how the batch grows, and so does batch_increase_function",
        "Set it to observe, or batch_increase_function=null",
    )
    yield (
        settings.lr_scaling == "gain" and settings.gradient_noise == "off",
        f"{BLOCK}.lr_scaling",
        "is computed from the gradient noise scale, which is not measured",
        f"Set {BLOCK}.gradient_noise=observe, or another rule",
    )
    others = {
        "use_maximum_batch_size": settings.use_maximum_batch_size,
        "batch_increase_function": settings.batch_increase_function is not None,
        f"{BLOCK}.token_budget": settings.budgets,
        f"{BLOCK}.gradient_noise=act": settings.gradient_noise == "act",
    }
    for other, is_set in others.items():
        yield (
            settings.use_fastest_configuration and is_set,
            "use_fastest_configuration",
            f"looks for the fastest way to train the configured batch, and {other} changes the batch",
            "Set one of the two to False",
        )


def _conflicts_with_config(cfg: DictConfig, settings: AdaptiveSettings) -> Iterator[Conflict]:
    """Settings of ours that do not go with torchtune's."""
    optimizer = cfg.optimizer._component_
    yield (
        settings.beta2 == "half_life" and not re.search(r"^torch\.optim\.Adam(W)?$", optimizer),
        f"{BLOCK}.beta2",
        f"corrects the second moment of torch's Adam, but the optimizer is {optimizer}",
        "Use torch.optim.AdamW or torch.optim.Adam, or set it to fixed",
    )
    longest = OmegaConf.select(cfg, "model.max_seq_len")
    yield (
        settings.probe_length and longest and settings.probe_length > longest,
        f"{BLOCK}.probe_length",
        f"is longer than the model takes (model.max_seq_len is {longest})",
        f"Set it to {longest} or less",
    )
    in_tensors = (cfg.get("tensor_parallel_dim") or 1) > 1
    searches = settings.use_maximum_batch_size or settings.use_fastest_configuration
    yield (
        settings.search_only and not searches,
        f"{BLOCK}.search_only",
        "has nothing to search for",
        "Set use_maximum_batch_size=True or use_fastest_configuration=True as well",
    )
    yield (
        settings.survives and in_tensors and cfg.get("compile", False),
        "compile",
        "cannot be combined with tensor_parallel_dim and use_maximum_batch_size, growth or shrink: a rank "
        "that runs out of memory launches the step's remaining collectives, and those of compiled code are "
        "not seen",
        "Set compile=False, or use_maximum_batch_size=False, batch_increase_function=null, "
        f"{BLOCK}.on_out_of_memory=raise, and choose batch_size yourself",
    )
    yield (
        settings.survives and in_tensors and cfg.get("optimizer_in_bwd", False),
        "optimizer_in_bwd",
        "cannot be combined with tensor_parallel_dim and use_maximum_batch_size, growth or shrink: some "
        "gradients are whole only after backward",
        "Set optimizer_in_bwd=False, or choose batch_size yourself",
    )
    yield (
        in_tensors and settings.gradient_noise != "off",
        f"{BLOCK}.gradient_noise",
        "is not measured with tensor_parallel_dim",
        "Set it to off, or tensor_parallel_dim=1",
    )
    yield (
        in_tensors and settings.use_fastest_configuration,
        "use_fastest_configuration",
        "cannot be combined with tensor_parallel_dim: it needs predictions, which there are none of",
        "Set use_fastest_configuration=False, or tensor_parallel_dim=1",
    )
    yield (
        settings.save_every_n_steps and cfg.get("enable_async_checkpointing", False),
        "save_every_n_steps",
        "cannot be asynchronous: torchtune finds asynchronous checkpoints by their epoch",
        "Set enable_async_checkpointing=False, or save_every_n_steps=null",
    )


def _conflicts_of_rollouts(cfg: DictConfig, settings: AdaptiveSettings) -> Iterator[Conflict]:
    """What is not there yet where rows are generated."""
    batch = "changes the batch, and that of a rollout is what the config says, always"
    rows = "is about rows of a dataset, and these are generated"
    tokens = settings.scoring_token_budget
    yield (
        tokens is not None and settings.scoring_batch_size is not None,
        f"{BLOCK}.scoring_token_budget",
        "decides how rows are scored, and so does scoring_batch_size",
        "Remove one of the two",
    )
    unsupported: dict[str, tuple[object, str, object]] = {
        "use_fastest_configuration": (
            settings.use_fastest_configuration,
            "needs predictions, and a run makes none of rollouts",
            False,
        ),
        "batch_increase_function": (settings.batch_increase_function, batch, None),
        f"{BLOCK}.gradient_noise": (settings.gradient_noise != "off", batch, "off"),
        f"{BLOCK}.grow_past_memory": (settings.grow_past_memory, batch, False),
        f"{BLOCK}.probe_length": (settings.probe_length, rows, None),
        f"{BLOCK}.search": (
            settings.search == "predict",
            "needs predictions, and a run makes none of rollouts",
            "extrapolate",
        ),
        "dataset.packed": (is_packed(cfg), rows, False),
    }
    for key, (is_set, reason, instead) in unsupported.items():
        value = "null" if instead is None else instead
        yield is_set, key, reason, f"Set {key}={value}"


def _conflicts_of_ppo(cfg: DictConfig) -> Iterator[Conflict]:
    """What two models that are trained cannot have, and what torchtune's recipe refuses."""
    yield (
        cfg.batch_size % cfg.ppo_batch_size,
        "ppo_batch_size",
        f"does not divide the batch_size {cfg.batch_size}",
        "Set it to a number that does",
    )
    yield (
        cfg.get("whiten_rewards", False),
        "whiten_rewards",
        "is read by torchtune's recipe and changes nothing there",
        "Set whiten_rewards=False",
    )
    values = cfg.value_checkpointer.output_dir
    yield (
        values == cfg.checkpointer.output_dir,
        "value_checkpointer.output_dir",
        "is the policy's, whose files have the same names",
        f"Set it to {values}/value",
    )
    for key in (knobs.OFFLOADING, "enable_async_checkpointing"):
        reason = "is not supported where two models are trained"
        yield cfg.get(key, False), key, reason, f"Set {key}=False"


def _require_knobs(settings: AdaptiveSettings) -> None:
    """What may change must be knobs; on a model that is already built, switches."""
    keys = settings.may_change if isinstance(settings.may_change, tuple) else ()
    for key in keys:
        if key not in KNOBS_BY_KEY:
            reason = "is not a knob that trades memory for speed"
            remedy = f"Use exact, rounding, or a list of {', '.join(KNOBS_BY_KEY)}"
        elif settings.use_fastest_configuration and not KNOBS_BY_KEY[key].switch:
            reason = "cannot be changed on a model that is already built"
            remedy = "Let tune-adaptive plan --fastest choose it, or leave it out"
        else:
            continue
        raise ConfigError(f"{BLOCK}.may_change", key, reason, remedy)


def _check_pairs(cfg: DictConfig, kind: Kind, settings: AdaptiveSettings) -> None:
    """What a sample of two rows cannot be combined with."""
    if kind.sample != "pair":
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
        raise missing_torchvision("collate_fn", cfg.collate_fn)


def missing_torchvision(key: str, value: object, error: BaseException | None = None) -> ConfigError:
    """The error where torchvision is needed and not installed or, as the error tells, of no use."""
    reason = "is not installed"
    if error is not None and find_spec("torchvision") is not None:
        reason = f"cannot be used ({str(error).splitlines()[0].rstrip('.')}): it was built for another torch"
    torch = version("torch").partition("+")[0]
    return ConfigError(
        key,
        value,
        f"needs torchvision for its images, which {reason}",
        f"Install the one for your torch: pip install torchvision torch=={torch}, from the index that torch "
        "came from",
    )


def token_budget_with_images(settings: AdaptiveSettings) -> ConfigError:
    return ConfigError(
        f"{BLOCK}.token_budget",
        settings.token_budget,
        "sizes micro-batches by their text, but these samples have images: a micro-batch is padded to the "
        "most images and tiles of any of its samples, so how many samples fit does not depend on text alone",
        "Set it to False; use_maximum_batch_size=True accounts for images",
    )
