"""What a config and the environment say about the memory of a step: the keys of caches.

Everything in a config counts, unless it is known not to matter. A key that is forgotten here costs a search
that was not needed; the other way round, a wrong size would be believed.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import libraries
from torchtune_adaptive.core import knobs
from torchtune_adaptive.recipe.settings.adaptive import BLOCK, AdaptiveSettings, top_level_keys
from torchtune_adaptive.recipe.settings.kind_table import (
    FOUND,
    FROZEN_CHECKPOINTERS,
    KNOWN_KEYS,
    VALUE_CHECKPOINTER,
)
from torchtune_adaptive.recipe.settings.knob_table import configured_batch

# What cannot change the memory of a step, and why.
_IRRELEVANT_KEYS = (
    # Where things lie, and what is logged.
    "output_dir",
    "checkpointer",
    VALUE_CHECKPOINTER,
    "resume_from_checkpoint",
    "enable_async_checkpointing",
    "save_adapter_weights_only",
    "metric_logger",
    "profiler",
    "log_every_n_steps",
    "log_peak_memory_stats",
    FOUND,
    # How long the run is, in which order it sees its samples, and numbers that have no size.
    "seed",
    "shuffle",
    "epochs",
    "max_steps_per_epoch",
    "lr_scheduler",
    "optimizer.lr",
    "kd_ratio",
    "fake_quant_after_n_steps",  # trials quantize, which takes more memory
    # What rows of a rollout are worth, how many rollouts there are, and sizes that a search replaces.
    "num_steps",
    "save_every_n_epochs",
    "stop_token_ids",
    "reward_functions",
    "min_response_length",
    "penalise_no_eos",
    "reward_penalty",
    "whiten_rewards",
    "kl_coeff",
    "gamma",
    "lmbda",
    "forward_batch_size",
    # Trials are made of one sample repeated; its length and whether samples are packed are facts themselves.
    "dataset",
    "tokenizer",
    # Validation has trials of its own.
    "dataset_val",
    "run_val_every_n_steps",
    "batch_size_val",
)
_IRRELEVANT_SETTINGS = (
    "search",  # all ways to search find the same size
    "search_only",
    "use_fastest_configuration",  # chooses among configs that each have facts of their own
    "may_change",
    "speed_trials",
    "cache",
    "save_every_n_steps",
    "keep_last_n_checkpoints",
    "stop_timeout",
    "workers",
    "lr_scaling",
    "beta2",
    "resume_learning_rate",
    "grow_back_after",
    "wait_for_memory",
    "rank_timeout",
    "step_timeout",
    "generation_batch_size",  # each phase is searched by itself
    "scoring_batch_size",
    "scoring_token_budget",
    "probe_length",  # decides the length of the trials, which is a fact itself
)
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def step_facts(cfg: DictConfig) -> dict[str, Any]:
    """What a config says about the memory of a step, whatever its size.

    Keys that no recipe knows are ignored by recipes, or they are variables of keys that count.
    """
    config = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(config, dict)
    for path in (*_IRRELEVANT_KEYS, *FROZEN_CHECKPOINTERS, "batch_size", BLOCK, *top_level_keys()):
        *blocks, key = path.split(".")
        node = config
        for block in blocks:
            node = node.get(block) or {}
        node.pop(key, None)
    facts = {k: config[k] for k in sorted(KNOWN_KEYS & config.keys()) if config[k] is not None}
    ours = {key: OmegaConf.select(cfg, key) for key in (knobs.CHECKPOINT, knobs.RECOMPUTE_LOSS)}
    return facts | {key: value for key, value in ours.items() if value is not None}


def search_facts(
    cfg: DictConfig, settings: AdaptiveSettings, *, ranks: int, capacity: int, **trials: Any
) -> dict[str, Any]:
    """Everything that could change the result of a search, with what its ``trials`` are made of.

    The capacity counts with two digits: it differs by a few pages from run to run, and a result is
    confirmed by a trial before it is used.
    """
    chosen = {k: v for k, v in asdict(settings).items() if k not in _IRRELEVANT_SETTINGS}
    chosen["on_out_of_memory"] = "shrink" if settings.shrinks else "raise"  # given, or by default
    return {
        "config": {**step_facts(cfg), "batch_size": configured_batch(cfg, ranks).micro_batch},
        "settings": chosen,
        **trials,
        "ranks": ranks,
        "capacity": float(f"{capacity:.2g}"),
        "libraries": libraries(),
        "allocator": allocator_facts(),
    }


def allocator_facts() -> dict[str, str | None]:
    """How the environment sets up the caching allocator."""
    return {name: os.environ.get(name) for name in _ALLOCATOR_VARIABLES}
