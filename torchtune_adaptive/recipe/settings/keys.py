"""The table of torchtune's keys: what each may be, which kinds of recipe know it, and what depends on it.

All that is known about a key stands in its row. From the rows come the checks of values, the keys of a kind,
the facts by which a cache finds the result of a search, and the comparison of a resumed run's config with its
checkpoint's. Our own settings have the same two flags, in ``adaptive.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    LAYERS,
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

FOUND = "search_result"
"""The key of a saved config that says what the search found; no setting."""

TENSORS = "tensor_parallel_dim"
COPIES = "data_parallel_replicate_dim"
SHARDS = "data_parallel_shard_dim"
CONTEXT = "context_parallel_dim"
ROTATION = "context_parallel_rotate_method"
VALUE_CHECKPOINTER = "value_checkpointer"

Names = frozenset[str]
"""Names of kinds of recipe."""

_FULL = frozenset({"full", "full_dpo", "qat"})
_ADAPTERS = frozenset({"lora", "lora_dpo", "kd", "qat_lora"})
_PAIRS = frozenset({"full_dpo", "lora_dpo"})
_QAT = frozenset({"qat", "qat_lora"})
_KD = frozenset({"kd"})
_GRPO = frozenset({"grpo", "grpo_lora"})
_PPO = frozenset({"ppo"})
_MESHES = frozenset({"full", "lora"})
_SUPERVISED = _FULL | _ADAPTERS
ROLLOUTS = _GRPO | _PPO
"""The kinds whose model generates its rows."""
_ALL = _SUPERVISED | ROLLOUTS
_NONE: Names = frozenset()


class Key(NamedTuple):
    """What is known about a key.

    Args:
        rule: what its value may be; None where no single rule says it.
        default: what is meant where it is missing or null.
        kinds: the kinds of recipe that know it.
        needed: the kinds whose configs must have a value.
        given: the kinds whose configs must have the key; it may be null.
        nullable: whether null is the same as no key.
        memory: whether it can change the memory of a step, and so what a search finds. A row that says True
            without need costs a search; one that says False without reason has a wrong size believed.
        result: whether it can change what is trained, by more than rounding.
    """

    rule: Rule | None = None
    default: Any = None
    kinds: Names = _ALL
    needed: Names = _NONE
    given: Names = _NONE
    nullable: bool = True
    memory: bool = True
    result: bool = True


_COUNT = at_least(1)


def _block(kinds: Names = _ALL, *, memory: bool = True, result: bool = True) -> Key:
    """A component that the configs of these kinds must have."""
    return Key(COMPONENT, kinds=kinds, needed=kinds, memory=memory, result=result)


def _about_output(rule: Rule, default: Any = False, kinds: Names = _ALL) -> Key:
    """Where things lie, and what is logged and saved."""
    return Key(rule, default, kinds, memory=False, result=False)


def _how_it_computes(
    rule: Rule | None, default: Any = False, kinds: Names = _ALL, *, nullable: bool = True
) -> Key:
    """The way in which, or the device on which, the same results are computed."""
    return Key(rule, default, kinds, nullable=nullable, result=False)


def _of_rollouts(
    rule: Rule,
    default: Any = None,
    kinds: Names = ROLLOUTS,
    *,
    needed: Names = _NONE,
    memory: bool = False,
) -> Key:
    """What generated rows are worth and how many rollouts there are, which has no size in memory."""
    return Key(rule, default, kinds, needed, memory=memory)


KEYS: dict[str, Key] = {
    "output_dir": Key(TEXT, needed=_ALL, memory=False, result=False),
    "checkpointer": _block(memory=False, result=False),
    VALUE_CHECKPOINTER: _block(_PPO, memory=False, result=False),
    "metric_logger": _block(memory=False, result=False),
    "profiler": _about_output(BLOCK_OF_KEYS, None),
    "log_every_n_steps": Key(_COUNT, 1, nullable=False, memory=False, result=False),
    "log_peak_memory_stats": _about_output(BOOLEAN),
    "resume_from_checkpoint": Key(BOOLEAN, False, given=_ALL, memory=False, result=False),
    "enable_async_checkpointing": _about_output(BOOLEAN, kinds=_FULL | {"grpo"}),
    "save_adapter_weights_only": _about_output(BOOLEAN, kinds=_ADAPTERS | {"grpo_lora"}),
    FOUND: Key(memory=False, result=False),
    # The models, and what is computed of them.
    "model": _block(_ALL - _PPO),
    "loss": _block(),
    "optimizer": _block(),
    "kd_loss": _block(_KD),
    "quantizer": _block(_QAT),
    "teacher_model": _block(_KD),
    "policy_model": _block(_PPO),
    "reward_and_value_model": _block(_PPO),
    # Weights that are not trained: their files have no size, but what is in them counts.
    "ref_checkpointer": _block(frozenset({"full_dpo", "grpo"}), memory=False),
    "teacher_checkpointer": _block(_KD, memory=False),
    "ref_policy_checkpointer": _block(_PPO, memory=False),
    "reward_checkpointer": _block(_PPO, memory=False),
    "dtype": Key(),
    "optimizer_in_bwd": Key(BOOLEAN, False, _FULL | _PPO),
    "clip_grad_norm": Key(POSITIVE),
    "lr_scheduler": Key(COMPONENT, memory=False),
    "kd_ratio": Key(RATIO, 0.5, _KD, memory=False),
    # Trials quantize, which takes more memory.
    "fake_quant_after_n_steps": Key(at_least(0), 0, _QAT, memory=False),
    # The batch, and how long the run is: what a resumed run keeps of it is up to ``checkpoints/progress.py``.
    "batch_size": Key(_COUNT, needed=_ALL),
    "gradient_accumulation_steps": Key(_COUNT, 1, needed=_SUPERVISED),
    "epochs": Key(_COUNT, 1, _ALL - _PPO, needed=_ALL - _PPO, memory=False, result=False),
    "max_steps_per_epoch": Key(
        _COUNT, None, _SUPERVISED, given=_SUPERVISED, memory=False, result=False
    ),
    "seed": Key(at_least(0, (1 << 32) - 1), given=_ALL, memory=False, result=False),
    "shuffle": Key(BOOLEAN, False, given=_ALL, memory=False),
    # Trials are made of one sample repeated; its length and whether samples are packed are facts themselves.
    "dataset": Key(memory=False),
    "tokenizer": _block(memory=False),
    "collate_fn": Key(FUNCTION, "torchtune.data.padded_collate_sft", _SUPERVISED - _PAIRS),
    # Validation has trials of its own.
    "dataset_val": Key(None, None, _SUPERVISED, memory=False, result=False),
    "run_val_every_n_steps": Key(_COUNT, None, _SUPERVISED, memory=False, result=False),
    "batch_size_val": Key(_COUNT, None, _SUPERVISED, memory=False, result=False),
    "device": Key(TEXT, needed=_ALL, result=False),
    "compile": _how_it_computes(BOOLEAN),
    "cudnn_deterministic_mode": _how_it_computes(one_of(0, 1, 2, "default", "warn", "error"), None),
    "enable_activation_checkpointing": _how_it_computes(BOOLEAN),
    "enable_activation_offloading": _how_it_computes(BOOLEAN),
    "ac_mode": _how_it_computes(one_of("none", "full", "selective"), None, _FULL | ROLLOUTS),
    "ac_option": _how_it_computes(either(_COUNT, one_of("op")), None, _FULL | ROLLOUTS),
    "fsdp_cpu_offload": _how_it_computes(BOOLEAN),
    "fsdp_reshard_after_forward": _how_it_computes(BOOLEAN, True),
    "custom_sharded_layers": _how_it_computes(LAYERS, None),
    TENSORS: _how_it_computes(_COUNT, 1, frozenset({"full"}), nullable=False),
    "tensor_parallel_plan": _how_it_computes(COMPONENT, None, frozenset({"full"})),
    COPIES: _how_it_computes(_COUNT, 1, _MESHES, nullable=False),
    SHARDS: _how_it_computes(either(_COUNT, one_of(-1)), -1, _MESHES, nullable=False),
    CONTEXT: _how_it_computes(_COUNT, 1, _MESHES, nullable=False),
    ROTATION: _how_it_computes(
        one_of("allgather", "alltoall"), "allgather", _MESHES, nullable=False
    ),
    # Reinforcement learning.
    "grpo_samples": _of_rollouts(_COUNT, 1, _GRPO, needed=_GRPO, memory=True),
    "max_generated_tokens": _of_rollouts(_COUNT, needed=ROLLOUTS, memory=True),
    "ppo_batch_size": _of_rollouts(_COUNT, None, _PPO, needed=_PPO, memory=True),
    "ppo_epochs": _of_rollouts(_COUNT, 1, memory=True),
    "temperature": _of_rollouts(SCALE, 1.0, memory=True),
    "top_k": _of_rollouts(_COUNT, memory=True),
    "enable_kv_cache": _of_rollouts(BOOLEAN, False, _PPO, memory=True),
    "forward_batch_size": _of_rollouts(_COUNT),  # a search replaces it
    "num_steps": _of_rollouts(_COUNT, needed=_PPO),
    "save_every_n_epochs": _of_rollouts(_COUNT, 1),
    "stop_token_ids": _of_rollouts(IDS),
    "reward_functions": _of_rollouts(REWARDS, None, _GRPO),
    "penalise_no_eos": _of_rollouts(BOOLEAN, False, _PPO),
    "reward_penalty": _of_rollouts(ANY_NUMBER, 0.0, _PPO),
    "min_response_length": _of_rollouts(at_least(0), 0, _PPO),
    "whiten_rewards": _of_rollouts(BOOLEAN, False, _PPO),
    "kl_coeff": _of_rollouts(FINITE, None, _PPO, needed=_PPO),
    "gamma": _of_rollouts(RATIO, None, _PPO, needed=_PPO),
    "lmbda": _of_rollouts(RATIO, None, _PPO, needed=_PPO),
}
"""The top-level keys of torchtune that any recipe of ours knows."""

_LENGTH = at_least(2)
_DATA = {"max_seq_len": Key(_LENGTH), "packed": Key(BOOLEAN)}
_SIZES = "vocab_size num_layers num_heads num_kv_heads embed_dim intermediate_dim lora_rank"
_MODEL = {
    "max_seq_len": Key(_LENGTH),
    **dict.fromkeys(_SIZES.split(), Key(_COUNT)),
    "lora_alpha": Key(SCALE),
    "lora_dropout": Key(SHARE),
    "attn_dropout": Key(SHARE),
}
_CHECKPOINTER = {
    "checkpoint_dir": Key(FOLDER),
    "checkpoint_files": Key(FILES),
    "recipe_checkpoint": Key(FILE, result=False),
    "adapter_checkpoint": Key(FILE, result=False),
}
_LOSS = {
    "kl_coeff": Key(FINITE),
    "epsilon": Key(FINITE),
    "beta": Key(SCALE),
    "label_smoothing": Key(RATIO),
    "num_output_chunks": Key(at_least(1, 1 << 20)),
}
_MODELS = ("model", "teacher_model", "policy_model", "reward_and_value_model")
_CHECKPOINTERS = tuple(key for key in KEYS if key.endswith("checkpointer"))
KEYS_OF_BLOCKS: dict[str, dict[str, Key]] = {
    "tokenizer": {"max_seq_len": Key(_LENGTH)},
    "dataset": _DATA,
    "dataset_val": _DATA,
    **dict.fromkeys(_MODELS, _MODEL),
    **dict.fromkeys(_CHECKPOINTERS, _CHECKPOINTER),
    **dict.fromkeys(("loss", "kd_loss"), _LOSS),
    "optimizer": {"lr": Key(FINITE, memory=False), "weight_decay": Key(FINITE)},
    "lr_scheduler": {"num_warmup_steps": Key(at_least(0))},
    "quantizer": {"groupsize": Key(_COUNT)},
    "profiler": {
        "enabled": Key(BOOLEAN),
        **dict.fromkeys(("wait_steps", "warmup_steps", "num_cycles"), Key(at_least(0))),
        "active_steps": Key(_COUNT),
    },
}
"""The keys inside of blocks whose values are looked at before the component has them. There is no list of all
that components take, so a key that is not here counts for everything, as its block does."""
