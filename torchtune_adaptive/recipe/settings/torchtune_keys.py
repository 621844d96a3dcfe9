"""What torchtune's own keys may be, as far as it can be seen before a model is built.

torchtune reads most of them without a check, so a wrong value ends a run late and unclearly, or trains
something else than was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.recipe.settings.kind_table import (
    CONTEXT,
    COPIES,
    FROZEN_CHECKPOINTERS,
    FROZEN_MODELS,
    ROTATION,
    SHARDS,
    TENSORS,
    VALUE_CHECKPOINTER,
    Kind,
)
from torchtune_adaptive.recipe.settings.rules import (
    ANY_NUMBER,
    BLOCK_OF_KEYS,
    BOOLEAN,
    COMPONENT,
    FILE,
    FILES,
    FINITE,
    FOLDER,
    FUNCTION,
    IDS,
    POSITIVE,
    RATIO,
    REWARDS,
    SCALE,
    SHARE,
    TEXT,
    Rule,
    at_least,
    either,
    one_of,
)

_REQUIRED: dict[str, Rule] = {
    "output_dir": TEXT,
    "device": TEXT,
    "batch_size": at_least(1),
    "gradient_accumulation_steps": at_least(1),
    "epochs": at_least(1),
    "model": COMPONENT,
    "tokenizer": COMPONENT,
    "optimizer": COMPONENT,
    "loss": COMPONENT,
    "checkpointer": COMPONENT,
    "metric_logger": COMPONENT,
}
_SWITCHES = """
log_peak_memory_stats resume_from_checkpoint shuffle compile enable_activation_checkpointing
enable_activation_offloading fsdp_cpu_offload fsdp_reshard_after_forward optimizer_in_bwd
enable_async_checkpointing save_adapter_weights_only
"""
_OPTIONAL: dict[str, Rule] = {
    "seed": at_least(0, (1 << 32) - 1),
    "cudnn_deterministic_mode": one_of(0, 1, 2, "default", "warn", "error"),
    "max_steps_per_epoch": at_least(1),
    "clip_grad_norm": POSITIVE,
    "collate_fn": FUNCTION,
    "lr_scheduler": COMPONENT,
    **dict.fromkeys(_SWITCHES.split(), BOOLEAN),
    "run_val_every_n_steps": at_least(1),
    "batch_size_val": at_least(1),
    "tensor_parallel_plan": COMPONENT,
    "ac_mode": one_of("none", "full", "selective"),
    "ac_option": either(at_least(1), one_of("op")),
    "kd_ratio": RATIO,
    "fake_quant_after_n_steps": at_least(0),
    "profiler": BLOCK_OF_KEYS,
}
_NUMBERS_OF_ROLLOUTS = """
grpo_samples max_generated_tokens forward_batch_size ppo_epochs ppo_batch_size num_steps
save_every_n_epochs top_k
"""
_OF_ROLLOUTS: dict[str, Rule] = {
    **dict.fromkeys(_NUMBERS_OF_ROLLOUTS.split(), at_least(1)),
    "gradient_accumulation_steps": at_least(1),
    "temperature": SCALE,
    "stop_token_ids": IDS,
    "reward_functions": REWARDS,
    **dict.fromkeys(("penalise_no_eos", "whiten_rewards", "enable_kv_cache"), BOOLEAN),
    **dict.fromkeys(("gamma", "lmbda"), RATIO),
    "kl_coeff": FINITE,
    "reward_penalty": ANY_NUMBER,
    "min_response_length": at_least(0),
}
"""What recipes that generate know, and what they need not be told."""
_NEEDED_BY_ROLLOUTS = (
    *("grpo_samples", "max_generated_tokens"),
    *("ppo_batch_size", "kl_coeff", "gamma", "lmbda"),
)
_NOT_NULL: dict[str, Rule] = {
    "log_every_n_steps": at_least(1),
    TENSORS: at_least(1),
    COPIES: at_least(1),
    SHARDS: either(at_least(1), one_of(-1)),
    CONTEXT: at_least(1),
    ROTATION: one_of("allgather", "alltoall"),
}
# Of torchtune's main branch: they change what is trained or how, and these recipes do not know them.
_UNKNOWN_UNLESS: dict[str, Any] = {
    "enable_fp8_training": False,
    "resize_token_embeddings": False,
}
_MUST_BE_GIVEN = ("seed", "shuffle", "max_steps_per_epoch", "resume_from_checkpoint")
# Inside blocks, where given.
_LENGTH = at_least(2)
_OF_DATA = {"max_seq_len": _LENGTH, "packed": BOOLEAN}
_SIZES = "vocab_size num_layers num_heads num_kv_heads embed_dim intermediate_dim lora_rank"
_OF_MODELS = {
    "max_seq_len": _LENGTH,
    **dict.fromkeys(_SIZES.split(), at_least(1)),
    "lora_alpha": SCALE,
    "lora_dropout": SHARE,
    "attn_dropout": SHARE,
}
_OF_CHECKPOINTERS = {
    "checkpoint_dir": FOLDER,
    "checkpoint_files": FILES,
    "recipe_checkpoint": FILE,
    "adapter_checkpoint": FILE,
}
_OF_LOSSES = {
    "kl_coeff": FINITE,
    "epsilon": FINITE,
    "beta": SCALE,
    "label_smoothing": RATIO,
    "num_output_chunks": at_least(1, 1 << 20),
}
_OF_BLOCKS: dict[str, dict[str, Rule]] = {
    "tokenizer": {"max_seq_len": _LENGTH},
    "dataset": _OF_DATA,
    "dataset_val": _OF_DATA,
    **dict.fromkeys(("model", *FROZEN_MODELS), _OF_MODELS),
    **dict.fromkeys(("checkpointer", VALUE_CHECKPOINTER, *FROZEN_CHECKPOINTERS), _OF_CHECKPOINTERS),
    **dict.fromkeys(("loss", "kd_loss"), _OF_LOSSES),
    "optimizer": {"lr": FINITE, "weight_decay": FINITE},
    "lr_scheduler": {"num_warmup_steps": at_least(0)},
    "quantizer": {"groupsize": at_least(1)},
    "profiler": {
        "enabled": BOOLEAN,
        **dict.fromkeys(("wait_steps", "warmup_steps", "num_cycles"), at_least(0)),
        "active_steps": at_least(1),
    },
}


def check_values(cfg: Mapping[str, Any], kind: Kind, more_blocks: Iterable[str] = ()) -> None:
    """Stop at a value that is none of those that its key may have.

    Args:
        cfg: the whole config, resolved.
        kind: the kind of the recipe.
        more_blocks: the blocks that the recipe needs besides those that all do.

    Raises:
        ConfigError: there is one.
    """
    if isinstance(size := cfg.get("batch_size"), str):
        raise ConfigError(
            "batch_size",
            size,
            "is not valid",
            "Must be an integer >= 1; to search for the largest that fits, set "
            "use_maximum_batch_size=True and leave batch_size a number",
        )
    required = {**_REQUIRED, **dict.fromkeys(more_blocks, COMPONENT)}
    given, optional = [*_MUST_BE_GIVEN], dict(_OPTIONAL)
    if kind.generates:
        needed = (
            _NEEDED_BY_ROLLOUTS if "epochs" in kind.keys else (*_NEEDED_BY_ROLLOUTS, "num_steps")
        )
        required |= {key: _OF_ROLLOUTS[key] for key in needed if key in kind.keys}
        required.pop("gradient_accumulation_steps")
        given.remove("max_steps_per_epoch")
        optional |= _OF_ROLLOUTS
    for key, rule in required.items():
        if key not in kind.less_keys:
            rule.read(key, cfg.get(key))
    for key in given:
        if key not in cfg:
            raise ConfigError(key, None, "is missing", f"Add {key}; it may be null")
    for key, rule in optional.items():
        if (value := cfg.get(key)) is not None:
            rule.read(key, value)
    for key, rule in _NOT_NULL.items():
        if key in cfg:
            rule.read(key, cfg[key])
    for key, default in _UNKNOWN_UNLESS.items():
        if cfg.get(key) not in (None, default):
            raise ConfigError(
                key,
                cfg[key],
                "is not supported by the adaptive recipes",
                f"Set {key}={default}, or use torchtune's recipe",
            )
    _check_datasets(cfg)
    for block, rules in _OF_BLOCKS.items():
        for name, node in blocks(cfg, block):
            for key, rule in rules.items():
                if isinstance(node, Mapping) and node.get(key) is not None:
                    rule.read(f"{name}.{key}", node[key])
    for key in ("checkpointer", VALUE_CHECKPOINTER):
        if key in kind.keys:
            FOLDER.read(f"{key}.output_dir", cfg[key].get("output_dir"))
    layers = cfg.get("custom_sharded_layers")
    is_list = isinstance(layers, list)
    if layers is not None and not (is_list and all(isinstance(name, str) for name in layers)):
        raise ConfigError(
            "custom_sharded_layers", layers, "is not valid", "Must be a list of layer names"
        )


def _check_datasets(cfg: Mapping[str, Any]) -> None:
    for key in ("dataset", "dataset_val"):
        found = list(blocks(cfg, key))
        if not found and (key == "dataset" or cfg.get(key)):
            COMPONENT.read(key, cfg.get(key))
        for name, node in found:
            COMPONENT.read(name, node)
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
