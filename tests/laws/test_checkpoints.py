"""What sharded checkpoints cost rank 0: it plans once who writes what."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours, tiny_config

STEPS = 3


def items_planned(folder: Path, background: bool, runs: int) -> list[tuple[int, int]]:
    """What rank 0 hears from all ranks, and what it tells them, in each save: items of their plans."""
    seen: list[tuple[int, int]] = []
    create = DefaultSavePlanner.create_global_plan

    def note(self: DefaultSavePlanner, plans: list[SavePlan]) -> Any:
        told, metadata = create(self, plans)
        seen.append((sum(len(one.items) for one in plans), sum(len(one.items) for one in told)))
        return told, metadata

    how: dict[str, Any] = {
        "adaptive_batching.sharded_checkpoints": "background" if background else True
    }
    how |= {"max_steps_per_epoch": STEPS, "save_every_n_steps": 1}
    with mock.patch.object(DefaultSavePlanner, "create_global_plan", note):
        for run in range(runs):
            run_ours("full", tiny_config("full", folder / f"{run}", **how))
    return seen


@pytest.mark.runs
@pytest.mark.parametrize(("ranks", "runs"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("background", [False, True])
def test_rank_zero_plans_once(background: bool, ranks: int, runs: int, tmp_path: Path) -> None:
    """In each run, also where one process has several."""
    seen = run_ranks(items_planned, ranks, tmp_path, background, runs, join=False)[0]
    saves = STEPS + 1  # the last at the end of the epoch
    assert len(seen) == runs * saves
    for first in range(0, len(seen), saves):
        assert min(seen[first]) > 100, seen
        assert set(seen[first + 1 : first + saves]) == {(0, 0)}, seen
