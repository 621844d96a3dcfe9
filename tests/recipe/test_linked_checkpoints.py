"""Checkpoints that people link into another output folder, to branch a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.runs import RESUME, assert_same_steps, train
from torchtune_adaptive.recipe.checkpoints.folder import STATE

pytestmark = [pytest.mark.runs]

CHANGES = {"max_steps_per_epoch": 2, "save_every_n_steps": 1}


@pytest.mark.parametrize(
    "keeps", [{}, pytest.param({"keep_last_n_checkpoints": 1}, marks=pytest.mark.exhaustive)]
)
def test_the_run_that_they_are_of_can_still_be_resumed(
    keeps: dict[str, int], tmp_path: Path
) -> None:
    first, branch = tmp_path / "first", tmp_path / "branch"
    train("full", first, epochs=1, **CHANGES)
    branch.mkdir()
    (branch / "epoch_0").symlink_to(first / "epoch_0")
    there = sorted(each.name for each in (first / "epoch_0").iterdir())
    branched = train("full", branch, epochs=2, **CHANGES, **RESUME, **keeps)
    assert len(branched) == 2
    assert STATE in there and sorted(each.name for each in (first / "epoch_0").iterdir()) == there
    assert_same_steps(train("full", first, epochs=2, **CHANGES, **RESUME), branched)
