"""A run that cannot begin leaves nothing behind, so that the next one in the same process can begin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch.distributed as dist

from tests.helpers.killing import in_child
from tests.helpers.ranks import Alone, run_ranks
from tests.helpers.recipes import run_ours, tiny_config
from torchtune_adaptive.common.errors import CheckpointError, ConfigError
from torchtune_adaptive.common.folder_lock import FolderLock
from torchtune_adaptive.recipe.checkpoints.folder import take_output_folders
from torchtune_adaptive.recipe.settings.asked import Asked

pytestmark = pytest.mark.runs

RUN = "torchtune_adaptive.recipe.run"
PREDICTS = {
    "use_maximum_batch_size": True,
    "adaptive_batching.memory_limit": "40MiB",
    "adaptive_batching.search": "predict",
}
ROLLOUTS = {
    **{"batch_size": 2, "grpo_samples": 2, "max_generated_tokens": 4, "num_steps": 1},
    "dataset.split": "train[:6]",
}
STAGES = {
    "the process group": f"{RUN}.attention_over_parts",
    "attention over parts of rows": f"{RUN}.recipe_kind",
    "the lock": f"{RUN}.device_memory",
    "the planner": f"{RUN}.start_metric_logger",
    "signals": "torchtune_adaptive.core.Watchdog.__enter__",
}
"""What has begun, and what fails after it."""
NO_SENSE = ConfigError("a key", "a value", "makes no sense", "Mend it")


def begin_twice(
    kind: str, folder: Path, changes: dict[str, Any], mistake: dict[str, Any], fails: str | None
) -> tuple[dict[str, bool], int]:
    """What the first of two runs has left behind, and how many steps the second one has logged."""
    attention = []

    @contextmanager
    def attention_over_parts(*_: object) -> Iterator[None]:
        attention.append("entered")
        try:
            yield
        finally:
            attention.append("left")

    with (
        patch(f"{RUN}.attention_over_parts", attention_over_parts),
        patch(fails, side_effect=NO_SENSE) if fails else nullcontext(),
        pytest.raises(ConfigError),
    ):
        run_ours(kind, tiny_config(kind, folder / "out", **changes, **mistake))
    left = {
        "process group": dist.is_initialized(),
        "attention": attention.count("entered") != attention.count("left"),
        "lock": in_child(lambda: FolderLock(folder / "out")) != 0,
        "planner": bool(psutil.Process().children(recursive=True)),
    }
    if any(left.values()):
        return left, 0
    return left, len(run_ours(kind, tiny_config(kind, folder / "out", **changes)))


@pytest.mark.rotating(2)
@pytest.mark.parametrize("fails", STAGES.values(), ids=STAGES)
def test_whatever_has_begun_is_undone(fails: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    [(left, steps)] = run_ranks(begin_twice, 1, "full", tmp_path, {}, PREDICTS, fails, join=False)
    assert not any(left.values()), left
    assert steps == 3


@pytest.mark.rotating
@pytest.mark.parametrize(("kind", "changes"), [("full", {}), ("grpo", ROLLOUTS)])
def test_a_mistake_can_be_mended(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """The logger comes last, and cannot write below a file."""
    (tmp_path / "file").write_text("")
    mistake = {
        "metric_logger._component_": "torchtune.training.metric_logging.DiskLogger",
        "metric_logger.log_dir": f"{tmp_path}/file/logs",
    }
    arguments = (kind, tmp_path, changes, mistake, None)
    [(left, steps)] = run_ranks(begin_twice, 1, *arguments, join=False)
    assert not any(left.values()), left
    assert steps > 0


@pytest.mark.parametrize("used", ["output_dir", "checkpointer.output_dir"])
def test_where_one_of_two_folders_is_in_use_the_other_is_not_kept(
    used: str, tmp_path: Path
) -> None:
    folders = {key: tmp_path / key for key in ("output_dir", "checkpointer.output_dir")}
    for folder in folders.values():
        folder.mkdir()
    checkpoints = {"checkpointer.output_dir": str(folders["checkpointer.output_dir"])}
    cfg = tiny_config("full", folders["output_dir"], **checkpoints)
    lock = FolderLock(folders[used])

    def refused() -> None:  # in a process of its own, to which the lock is another's
        with pytest.raises(CheckpointError, match="another run is using it"), ExitStack() as begun:
            take_output_folders(Asked.of(cfg), Alone(), begun)
        for folder in folders.values():
            assert folder == folders[used] or in_child(lambda at=folder: FolderLock(at)) == 0

    assert in_child(refused) == 0
    lock.release()
