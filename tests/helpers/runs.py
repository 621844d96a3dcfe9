"""Whole runs on ranks of their own, and whether two of them are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours, saved_weights, tiny_config

SHORT = {"save_every_n_steps": 2, "max_steps_per_epoch": 4, "epochs": 2}
ASYNCHRONOUS = {"enable_async_checkpointing": True, "max_steps_per_epoch": 2, "epochs": 3}
RESUME = {"resume_from_checkpoint": True}


def train(kind: str, folder: Path, ranks: int = 1, **changes: Any) -> list[dict[str, float]]:
    """Run our recipe for the tiny config of a kind, with changes; what it logged."""
    cfg = tiny_config(kind, folder, **changes)
    records, *_ = run_ranks(run_ours, ranks, kind, cfg, join=False)
    return records


def same(one: list[dict[str, float]], other: list[dict[str, float]]) -> bool:
    """Whether two runs logged the same, the speed of the machine apart."""
    machine = {"tokens_per_second_per_gpu", "memory_unused_share"}
    return [{k: v for k, v in r.items() if k not in machine} for r in one] == [
        {k: v for k, v in r.items() if k not in machine} for r in other
    ]


def same_weights(folder: Path, other: Path, name: str) -> bool:
    """Whether two runs saved the same weights, bit for bit, under this name."""
    ours, theirs = saved_weights(folder / name), saved_weights(other / name)
    return bool(ours) and all(torch.equal(ours[key], theirs[key]) for key in ours)
