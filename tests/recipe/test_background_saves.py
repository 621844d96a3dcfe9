"""What is being written in the background when training ends for another reason than that it is done."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.recipes import run_ours, tiny_config
from torchtune_adaptive.common import FolderInUse, FolderLock
from torchtune_adaptive.common.errors import Stopped
from torchtune_adaptive.core.step.train_step import TrainStep
from torchtune_adaptive.recipe.checkpoints.checkpoints import Checkpoints
from torchtune_adaptive.recipe.checkpoints.sharded import ShardedCheckpoints

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

CHANGES: dict[str, Any] = {
    "epochs": 2,
    "max_steps_per_epoch": 2,
    "batch_size": 2,
    "adaptive_batching.sharded_checkpoints": "background",
}
SLOW = 1.5
"""Seconds that writing takes."""
INCREASES = {
    **{"use_maximum_batch_size": True, "adaptive_batching.memory_limit": "40MiB"},
    "batch_increase_function": f"{__name__}.fails_in_epoch_1",
}
RAISES = {"adaptive_batching.on_out_of_memory": "raise"}


def fails_in_epoch_1(epoch: int, batch_size: int) -> int:
    if epoch == 1:
        raise ValueError("no batch")
    return batch_size


def fails(error: str, on_rank: int | None) -> Any:
    """Let the first step after the first checkpoint end like this, on one rank or on all."""
    apply, steps = TrainStep.apply, iter(range(1, 100))

    def apply_or_fail(self: TrainStep, **how: bool) -> Any:
        if next(steps) == 3 and on_rank in (None, dist.get_rank()):
            if error == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            elif error:
                raise {"out of memory": torch.OutOfMemoryError, "bug": ValueError}[error](error)
        return apply(self, **how)

    return patch.object(TrainStep, "apply", apply_or_fail)


def written_slowly(seconds: float) -> Any:
    written = ShardedCheckpoints._written

    def slowly(self: ShardedCheckpoints, *arguments: Any) -> Any:
        time.sleep(seconds)
        return written(self, *arguments)

    return patch.object(ShardedCheckpoints, "_written", slowly)


def end_while_saving(cfg: Any, error: str, on_rank: int | None) -> None:
    """A run that ends like this, and says what is there then."""
    with written_slowly(SLOW), fails(error, on_rank):
        try:
            run_ours("full", cfg)
        except (Exception, Stopped) as ended:
            print(f"{type(ended).__name__}: {ended}")
    print("saved:", *(each.name for each in Path(cfg.output_dir).glob("*epoch_*")), flush=True)
    sys.exit(1)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("error", "on_rank", "changes", "reason"),
    [
        ("", None, INCREASES, "no batch"),
        ("bug", None, {}, "ValueError: bug"),
        ("bug", 1, {}, "ValueError: bug"),
        ("out of memory", None, RAISES, "/dist_epoch_0. (out of memory)"),
        ("SIGTERM", None, {}, "Stopped: stopped as requested, and saved"),
    ],
    ids=["schedule", "bug", "bug of one rank", "out of memory", "signal"],
)
def test_a_checkpoint_that_is_being_written_is_there_at_the_end(
    error: str,
    on_rank: int | None,
    changes: dict[str, Any],
    reason: str,
    ranks: int,
    tmp_path: Path,
) -> None:
    cfg = tiny_config("full", tmp_path / "out", **CHANGES, **changes)
    on_rank = None if on_rank is None else ranks - 1
    until = [*range(ranks)]
    *_, last = watch_ranks(
        end_while_saving, ranks, cfg, error, on_rank, until_exit_of=until, join=False
    )
    assert reason in last.said and "dist_epoch_0" in last.said.rpartition("saved:")[2], last.said


def lose(cfg: Any) -> None:
    with written_slowly(3600), fails("bug", None):
        run_ours("full", cfg)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_one_that_takes_too_long_is_named(ranks: int, tmp_path: Path) -> None:
    changes = {**CHANGES, "adaptive_batching.stop_timeout": 1}
    cfg = tiny_config("full", tmp_path / "out", **changes)
    began = time.monotonic()
    every = [*range(ranks)]
    ended = watch_ranks(lose, ranks, cfg, until_exit_of=every, join=False, timeout=120)
    assert time.monotonic() - began < 100
    for rank in ended:
        assert rank.exit_code == 1
        assert "dist_epoch_0 is lost: it was still being written when the run ended" in rank.said
        assert f"Waiting up to 1 s for {tmp_path}/out/dist_epoch_0" in rank.said


def closes_slowly(folder: Path, cfg: Any) -> None:
    close = Checkpoints.close

    def look_and_close(self: Checkpoints) -> None:
        (folder / "closing").touch()
        end = time.monotonic() + 60
        while not (folder / "looked").exists() and time.monotonic() < end:
            time.sleep(0.01)
        close(self)

    with patch.object(Checkpoints, "close", look_and_close):
        run_ours("full", cfg)


def takes_the_lock(folder: Path) -> str:
    while not (folder / "closing").exists():
        time.sleep(0.01)
    try:
        FolderLock(folder / "out")
        return "taken"
    except FolderInUse:
        return "in use"
    finally:
        (folder / "looked").touch()


def close_or_take(folder: Path, cfg: Any) -> str:
    if os.environ["RANK"] == "1":
        return takes_the_lock(folder)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "1"
    closes_slowly(folder, cfg)
    return "done"


def test_the_folder_is_locked_until_the_last_file_is_gone(tmp_path: Path) -> None:
    cfg = tiny_config("full", tmp_path / "out", max_steps_per_epoch=1)
    assert run_ranks(close_or_take, 2, tmp_path, cfg, join=False) == ["done", "in use"]


def take_slowly(cfg: Any, seconds: float, says: bool) -> None:
    take = FolderLock.__init__

    def slowly(self: FolderLock, folder: Path, waits: Any) -> None:
        if says:
            waits(seconds)
        time.sleep(seconds)
        take(self, folder, waits)

    with patch.object(FolderLock, "__init__", slowly):
        run_ours("full", cfg)
    sys.exit(0)


@pytest.mark.parametrize("says", [False, True], ids=["hangs", "waits for another machine"])
def test_whoever_waits_for_the_lock_of_rank_0_says_so(says: bool, tmp_path: Path) -> None:
    limit = {"adaptive_batching.rank_timeout": 2, "max_steps_per_epoch": 1}
    cfg = tiny_config("full", tmp_path / "out", **limit)
    seconds = 8.0 if says else 3600.0
    until = [0, 1] if says else [1]
    ended = watch_ranks(
        take_slowly, 2, cfg, seconds, says, until_exit_of=until, join=False, timeout=120
    )
    if says:
        assert [rank.exit_code for rank in ended] == [0, 0], ended
        return
    assert ended[1].exit_code == 70
    assert "rank 0 has been hanging for" in ended[1].said
    assert "waits for it in 'taking the output folders'" in ended[1].said
