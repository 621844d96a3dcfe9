"""The settings of a config that cannot be combined, each with the reason and the remedy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from omegaconf import DictConfig, ListConfig, OmegaConf

from torchtune_adaptive.core import knobs
from torchtune_adaptive.recipe.settings.adaptive import BLOCK, AdaptiveSettings
from torchtune_adaptive.recipe.settings.asked import ACCUMULATION, Asked
from torchtune_adaptive.recipe.settings.keys import CONTEXT, COPIES, TENSORS
from torchtune_adaptive.recipe.settings.kind_table import Kind
from torchtune_adaptive.recipe.settings.knob_table import configured_checkpoint

_CUDA_GRAPHS = {"TORCH_COMPILE_BACKEND": "cudagraphs", "TORCHINDUCTOR_CUDAGRAPHS": "1"}
Conflict = tuple[object, str, str, str]
"""Whether there is one, the key that it is reported for, the reason and the remedy."""


def conflicts(asked: Asked) -> Iterator[Conflict]:
    """Everything that is looked at; the first conflict that there is counts."""
    cfg, kind, settings = asked.cfg, asked.kind, asked.settings
    yield from _conflicts_of_memory(asked)
    yield from _conflicts_of_recipe(asked)
    yield from _conflicts_of_meshes(asked)
    if cfg.get("optimizer_in_bwd", False):
        yield from _conflicts_with_optimizer_in_backward(settings)
    yield from _conflicts_of_decisions(kind, settings)
    yield from _conflicts_with_config(asked)
    if settings.dropout == "sample":
        yield from _conflicts_of_dropout(asked)
    if kind.generates:
        yield from _conflicts_of_rollouts(asked)
    if kind.name == "ppo":
        yield from _conflicts_of_ppo(cfg)
    yield from _conflicts_of_samples(asked)


# --- torchtune's own keys -------------------------------------------------------------------------


def _conflicts_of_memory(asked: Asked) -> Iterator[Conflict]:
    """What is kept of activations, in which precision, and where."""
    cfg = asked.cfg
    yield (
        cfg.get("dtype") not in ("bf16", "fp32", "fp64"),
        "dtype",
        "is not supported (fp16 needs loss scaling, which these recipes do not have)",
        "Use bf16 or fp32",
    )
    checkpoint, loss = configured_checkpoint(asked), OmegaConf.select(cfg, knobs.LOSS)
    offloads = cfg.get(knobs.OFFLOADING, False)
    yield (
        offloads and cfg.device != "cuda",
        knobs.OFFLOADING,
        f"needs a CUDA device, but device is {cfg.device}",
        "Set enable_activation_offloading=False",
    )
    yield (
        offloads and asked.images,
        knobs.OFFLOADING,
        "does not work with images in torchtune",
        "Set enable_activation_offloading=False",
    )
    yield (
        offloads and not knobs.checkpointed_share(checkpoint),
        knobs.OFFLOADING,
        "works only together with the checkpointing of whole layers",
        "Set enable_activation_checkpointing=True as well",
    )
    yield (
        checkpoint == "operations" and cfg.get(knobs.COMPILE, False),
        knobs.CHECKPOINT,
        "keeps the results of single operations, which compile=True fuses",
        f"Set {knobs.CHECKPOINT} to all, or compile=False",
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


def _conflicts_of_recipe(asked: Asked) -> Iterator[Conflict]:
    """What this kind of recipe cannot do."""
    cfg, kind = asked.cfg, asked.kind
    yield (
        "left_pad_sequence" in (cfg.get("collate_fn") or ""),
        "collate_fn",
        "pads on the left, which is for generation only",
        "Use torchtune.data.padded_collate_sft",
    )
    yield (
        "quantizer" in kind.keys and cfg.get(knobs.COMPILE, False),
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
        in_backward and asked.accumulation > 1,
        ACCUMULATION,
        "cannot accumulate: with optimizer_in_bwd every backward pass is an optimizer step",
        "Set gradient_accumulation_steps=1, or optimizer_in_bwd=False",
    )


def _conflicts_of_meshes(asked: Asked) -> Iterator[Conflict]:
    cfg, kind = asked.cfg, asked.kind
    yield (
        TENSORS not in kind.keys and not kind.adapters and (cfg.get(TENSORS) or 1) > 1,
        TENSORS,
        f"is not available in {kind.recipe}",
        "Remove it",
    )
    for key in (COPIES, CONTEXT):
        yield (
            key not in kind.keys and (cfg.get(key) or 1) > 1,
            key,
            f"is not available in {kind.recipe}",
            f"Set {key}=1",
        )
    for block in ("dataset", "dataset_val"):
        yield (
            asked.contexts > 1 and asked.packed(block),
            f"{block}.packed",
            "goes into attention as a mask, and context parallelism splits rows without one",
            f"Set {block}.packed=False, or {CONTEXT}=1",
        )
    yield (
        asked.holders > 1 and cfg.get("tensor_parallel_plan") is None,
        TENSORS,
        "needs to know how to split the model",
        "Set tensor_parallel_plan, or tensor_parallel_dim=1",
    )
    yield (
        asked.holders > 1 and cfg.optimizer.get("fused", False),
        "optimizer.fused",
        "does not work with tensor parallelism",
        "Set optimizer.fused=False",
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


def _conflicts_with_config(asked: Asked) -> Iterator[Conflict]:
    """Settings of ours that do not go with torchtune's."""
    cfg, settings = asked.cfg, asked.settings
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
    yield (
        settings.sample_order == "streaming" and not asked["shuffle"],
        f"{BLOCK}.sample_order",
        "is a way to shuffle samples, and they stay in the dataset's order: shuffle is not True",
        f"Set shuffle=True, or remove {BLOCK}.sample_order",
    )
    in_tensors = asked.holders > 1
    searches = settings.use_maximum_batch_size or settings.use_fastest_configuration
    yield (
        settings.search_only and not searches,
        f"{BLOCK}.search_only",
        "has nothing to search for",
        "Set use_maximum_batch_size=True or use_fastest_configuration=True as well",
    )
    shared = TENSORS if in_tensors else CONTEXT if asked.contexts > 1 else None
    yield (
        settings.survives and shared and asked["compile"],
        "compile",
        f"cannot be combined with {shared} and use_maximum_batch_size, growth or shrink: a rank that runs "
        "out of memory launches the step's remaining collectives, and those of compiled code are not seen",
        "Set compile=False, or use_maximum_batch_size=False, batch_increase_function=null, "
        f"{BLOCK}.on_out_of_memory=raise, and choose batch_size yourself",
    )
    for name, value in _CUDA_GRAPHS.items():
        yield (
            settings.survives and asked["compile"] and os.environ.get(name) == value,
            "compile",
            f"is True, and {name}={value} in the environment captures CUDA graphs, which have one size of "
            "micro-batch and cannot be left in the middle when memory runs out",
            f"Unset {name}",
        )
    yield (
        settings.survives and in_tensors and asked["optimizer_in_bwd"],
        "optimizer_in_bwd",
        "cannot be combined with tensor_parallel_dim and use_maximum_batch_size, growth or shrink: some "
        "gradients are whole only after backward",
        "Set optimizer_in_bwd=False, or choose batch_size yourself",
    )
    yield (
        shared and settings.gradient_noise != "off",
        f"{BLOCK}.gradient_noise",
        f"is not measured with {shared}",
        f"Set it to off, or {shared}=1",
    )
    yield (
        in_tensors and settings.recompute_loss,
        knobs.RECOMPUTE_LOSS,
        "cannot be combined with tensor_parallel_dim: logits are whole only outside of the last projection",
        "Set it to False, or tensor_parallel_dim=1",
    )


def _conflicts_of_dropout(asked: Asked) -> Iterator[Conflict]:
    """Rows that do not have the same places on any ranks, in any micro-batch."""
    rows = {
        "this recipe generates its rows, and trains without dropout": asked.kind.generates,
        f"{TENSORS} splits them over ranks": asked.holders > 1,
        f"{CONTEXT} splits them over ranks": asked.contexts > 1,
        "images are padded in the middle of them": asked.images,
    }
    for reason, there in rows.items():
        yield (
            there,
            f"{BLOCK}.dropout",
            f"needs rows that are the same in any micro-batch, but {reason}",
            "Set it to torch",
        )


def _conflicts_of_rollouts(asked: Asked) -> Iterator[Conflict]:
    """What is not there yet where rows are generated."""
    settings = asked.settings
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
        "dataset.packed": (asked.packed(), rows, False),
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


def _conflicts_of_samples(asked: Asked) -> Iterator[Conflict]:
    """What samples cannot be: of unknown number, or pairs where single rows are counted."""
    datasets = (
        asked.cfg.dataset if isinstance(asked.cfg.dataset, ListConfig) else [asked.cfg.dataset]
    )
    yield (
        any(dataset.get("streaming", False) for dataset in datasets),
        "dataset.streaming",
        "gives rows one after the other, but epochs and batches are made of rows by their number",
        "Set dataset.streaming=False",
    )
    pairs = asked.kind.sample == "pair"
    yield (
        pairs and asked.settings.budgets,
        f"{BLOCK}.token_budget",
        "counts tokens of single rows, but a sample of this recipe is a pair, and its loss is a mean over "
        "pairs",
        "Set it to False, and use_maximum_batch_size=True to have the number of pairs found",
    )
    yield (
        pairs and asked.packed(),
        "dataset.packed",
        "packs single rows, but a sample is a pair",
        "Set it to False",
    )
