"""Snapshots between checkpoints: a run that dies goes on from the newest that is whole, to the bit."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from omegaconf import DictConfig

from tests.helpers.killing import Copies
from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import (
    RESUME,
    Records,
    assert_same_end,
    assert_same_records,
    assert_same_steps,
    assert_same_weights,
    train,
    undisturbed,
)
from torchtune_adaptive.common import durable
from torchtune_adaptive.recipe.checkpoints import how_to_save, sharded, snapshots
from torchtune_adaptive.recipe.checkpoints.folder import CheckpointFolder
from torchtune_adaptive.recipe.checkpoints.snapshots import Snapshots, lack_of_room
from torchtune_adaptive.recipe.train.loop import TrainingLoop

STEPS = {"max_steps_per_epoch": 8, "epochs": 1}
EVERY = "adaptive_batching.snapshot_every_n_steps"
GRPO = {
    **{"dataset.split": "train[:8]", "max_generated_tokens": 8, "num_steps": 3, "epochs": 3},
    **{"batch_size": 4, "grpo_samples": 2, "max_steps_per_epoch": None, "save_every_n_epochs": 3},
}
PPO = {
    **{"dataset.split": "train[:16]", "max_generated_tokens": 8, "num_steps": 16, "epochs": 2},
    **{"batch_size": 4, "ppo_batch_size": 2, "max_steps_per_epoch": 1},
}
GIB = 1 << 30


def taking(folder: Path, every: int = 2) -> dict[str, Any]:
    return {EVERY: every, "adaptive_batching.snapshot_folder": str(folder / "memory")}


def run_killed(kind: str, cfg: DictConfig, after: int, written: bool = True) -> None:
    """A run of which all ranks are killed after a step, when its snapshots are ``written``."""
    step, take = TrainingLoop._step, Snapshots.take

    def step_or_die(self: TrainingLoop, epoch: int) -> Any:
        if self.global_step == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, epoch)

    def take_and_wait(self: Snapshots, *arguments: Any) -> None:
        take(self, *arguments)
        self._finish()

    TrainingLoop._step = step_or_die  # type: ignore[method-assign]
    if written:
        Snapshots.take = take_and_wait  # type: ignore[method-assign]
    run_ours(kind, cfg)


def killed(kind: str, folder: Path, ranks: int, after: int, **changes: Any) -> None:
    cfg = tiny_config(kind, folder / "out", **changes)
    ended = watch_ranks(
        run_killed, ranks, kind, cfg, after, until_exit_of=[*range(ranks)], join=False
    )
    assert all(each.exit_code == -signal.SIGKILL for each in ended), ended[0].said


def taken(folder: Path) -> dict[int, Path]:
    """The snapshots that are there, by their step."""
    found = (folder / "memory").glob("*/*/epoch_*")
    return {int(each.name.rpartition("_")[2]): each for each in found}


# --- whole runs ---------------------------------------------------------------------------------------

RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "full": ("full", 2, STEPS),
    "alone": ("full", 1, STEPS),
    "optimizer in backward": ("full", 2, {**STEPS, "optimizer_in_bwd": True}),
    "lora": ("lora", 2, {**STEPS, "model.lora_dropout": 0.1}),
    "preference": ("full_dpo", 2, STEPS),
    "sharded checkpoints": (
        "full",
        2,
        {
            **STEPS,
            "adaptive_batching.sharded_checkpoints": "background",
            "save_every_n_steps": 3,
        },
    ),
}
QUICK = {"full", "lora"}


@pytest.mark.runs
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.exhaustive) for n in RUNS]
)
def test_a_run_that_dies_goes_on_from_its_newest_snapshot(name: str, tmp_path: Path) -> None:
    kind, ranks, changes = RUNS[name]
    whole, expected = undisturbed(kind, ranks, **changes)
    killed(kind, tmp_path, ranks, 7, **changes, **taking(tmp_path))
    assert 4 in taken(tmp_path) and len(taken(tmp_path)) == 2, "the newest two"
    assert not list((tmp_path / "out").glob("epoch_0"))
    resumed = train(kind, tmp_path / "out", ranks, **changes, **taking(tmp_path), **RESUME)
    assert len(resumed) == 2, "from step 6"
    assert_same_end(resumed, expected)
    assert_same_weights(whole / "epoch_0", tmp_path / "out" / "epoch_0")
    assert not list((tmp_path / "memory").iterdir())
    assert not (tmp_path / "out" / snapshots.NAME).exists()


@pytest.mark.runs
@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "changes"), [("grpo", GRPO), ("ppo", PPO)])
def test_rollouts_have_snapshots_at_their_end(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    whole, expected = undisturbed(kind, 2, **changes)
    last = max(int(record["step"]) for record in expected)
    killed(kind, tmp_path, 2, last - 1, **changes, **taking(tmp_path, 1))
    assert taken(tmp_path)
    resumed = train(kind, tmp_path / "out", 2, **changes, **taking(tmp_path, 1), **RESUME)
    assert 0 < len(resumed) < len(expected)
    assert_same_end(resumed, expected)
    [end] = [each.name for each in whole.glob("epoch_*") if (each.name, "") > ("epoch_0", "")][-1:]
    assert_same_weights(whole / end, tmp_path / "out" / end)


@pytest.mark.runs
def test_other_ranks_go_on(tmp_path: Path) -> None:
    changes = {**STEPS, "batch_size": 3, "dataset.split": "train[:60]"}
    _, expected = undisturbed("full", 2, **changes)
    run = tmp_path / "run"
    killed("full", run, 2, 5, **changes, **taking(run))
    run.rename(tmp_path / "kept")
    for ranks in (1, 3):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(tmp_path / "kept", run)
        resumed = train("full", run / "out", ranks, **changes, **taking(run), **RESUME)
        assert_same_steps(resumed, expected[4:])


# --- which one is resumed from ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves that was killed after step 7: snapshots of steps 4 and 6, a checkpoint of step 3."""
    run = tmp_path_factory.mktemp("left") / "run"
    killed("full", run, 2, 7, **STEPS, **taking(run), save_every_n_steps=3)
    return run.rename(run.with_name("kept"))


def again(left: Path) -> Path:
    """The same once more, where it was."""
    run = left.with_name("run")
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(left, run, symlinks=True)
    return run
