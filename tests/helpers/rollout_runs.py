"""Runs with rollouts, and what they log."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from omegaconf import DictConfig

from tests.helpers.recipes import run_ours
from tests.helpers.runs import (
    MACHINE,
    Record,
    Records,
)
from torchtune_adaptive.recipe.train.rollouts import Rollouts


def of_training(records: Records) -> list[Record]:
    """What was logged of each step, without what differs from run to run."""
    return [{k: v for k, v in each.items() if k not in MACHINE} for each in records]


def run_short_of_memory(kind: str, cfg: DictConfig, phase: str | None, factor: float) -> Records:
    """Run with less memory on the last rank in one phase of the second rollout."""
    usual = {name: getattr(Rollouts, name) for name in ("_generate", "_score")}

    def short(name: str) -> Any:
        def run(self: Rollouts, rows: Any) -> None:
            step = self.phases.generation.step
            memory, ranks = step.memory, step.ranks
            less = memory.in_use() + int((memory.capacity() - memory.in_use()) * factor)
            # A rollout in the middle, so that the one after it is seen as well.
            is_short = name == phase and self._number == 2 and ranks.rank == ranks.size - 1
            with memory.capped(less) if is_short else nullcontext():
                usual[name](self, rows)

        return run

    for name in usual:
        setattr(Rollouts, name, short(name))
    try:
        return run_ours(kind, cfg, draws=phase is not None)
    finally:
        for name, method in usual.items():
            setattr(Rollouts, name, method)
