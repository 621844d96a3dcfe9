"""What a config and the environment say about the memory of a step: the keys of caches.

Everything in a config counts, unless its row in ``keys.py`` says that it does not matter. A list of what
counts would be shorter, but a key that is forgotten in it has a wrong size believed; here it costs a
search that was not needed. Facts alone are never enough: memory also depends on what else is on the
device and on how it is fragmented, so a cached size is confirmed by a trial before it is used. That is
why facts need not be exact, as the capacity is not.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import libraries
from torchtune_adaptive.core import knobs
from torchtune_adaptive.recipe.settings.adaptive import BLOCK, keys_with, top_level_keys
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.keys import KEYS, KEYS_OF_BLOCKS
from torchtune_adaptive.recipe.settings.secrets import facts_of

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def step_facts(cfg: DictConfig) -> dict[str, Any]:
    """What a config says about the memory of a step, whatever its size.

    Keys that no recipe knows are ignored by recipes, or they are variables of keys that count.
    """
    config = facts_of(cfg)
    for key in ("batch_size", BLOCK, *top_level_keys()):
        config.pop(key, None)
    for key, row in KEYS.items():
        if not row.memory:
            config.pop(key, None)
    for block, rows in KEYS_OF_BLOCKS.items():
        for key, row in rows.items():
            if not row.memory:
                (config.get(block) or {}).pop(key, None)
    facts = {k: config[k] for k in sorted(KEYS.keys() & config.keys()) if config[k] is not None}
    keys = knobs.CHECKPOINT, knobs.RECOMPUTE_LOSS, f"{BLOCK}.dropout"
    ours = {key: OmegaConf.select(cfg, key) for key in keys}
    return facts | {key: value for key, value in ours.items() if value is not None}


def search_facts(asked: Asked, *, ranks: int, capacity: int, **trials: Any) -> dict[str, Any]:
    """Everything that could change the result of a search, with what its ``trials`` are made of.

    The capacity counts with two digits: it differs by a few pages from run to run, and a result is
    confirmed by a trial before it is used.
    """
    settings = asked.settings
    chosen = {k: v for k, v in asdict(settings).items() if k in keys_with("memory")}
    chosen["on_out_of_memory"] = "shrink" if settings.shrinks else "raise"  # given, or by default
    return {
        "config": {**step_facts(asked.cfg), "batch_size": asked.batch(ranks).micro_batch},
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
