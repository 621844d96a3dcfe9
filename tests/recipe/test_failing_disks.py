"""Runs whose disk fails while they save: one line says so, and they resume from the right checkpoint."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from tests.helpers.failing_disks import Failure, failing_runs, library
from tests.helpers.killing import record_operations, what_power_may_take
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import in_files, run_ours, tiny_config
from tests.helpers.runs import (
    ALL_KEPT,
    RESUME,
    assert_same_end,
    assert_same_weights,
    stopped_after,
    train,
    undisturbed,
)
from torchtune_adaptive.common import CheckpointError
from torchtune_adaptive.core import Ranks
from torchtune_adaptive.recipe.checkpoints.all_or_none import AllOrNone

pytestmark = pytest.mark.runs

SAVES = {"save_every_n_steps": 2, "max_steps_per_epoch": 3, "epochs": 2}
SHARDED = {"adaptive_batching.sharded_checkpoints": True}
ERRORS = {
    **{"open": errno.ENOSPC, "write": errno.EDQUOT, "close": errno.EIO},
    **{"lost": errno.EDQUOT, "fsync": errno.EIO},
}
GATHERED_FILES = {
    # safetensors itself would write another file, and rename it.
    "weights": "/epoch_0/model-00001-:/epoch_0/.tmp",
    "state": "/recipe_state/recipe_state.pt",
    "index": "/epoch_0/model.safetensors.index.json",
    # torchtune copies to the first, and what seals a checkpoint flushes the second.
    "copied": "/epoch_0/./config.json:/epoch_0/config.json",
    "manifest": "/.checkpoint.json",
}
SHARDED_FILES = {
    "rank 1": "/dist_epoch_0/__1_",
    "rank 0": "/dist_epoch_0/__0_",
    "metadata": "/dist_epoch_0/.metadata",
    "state": "/dist_epoch_0/training_state.pt",
    "manifest": "/.checkpoint.json",
}
MODES: dict[str, tuple[int, str, dict[str, Any], dict[str, str]]] = {
    "gathered": (1, "epoch_0", {}, GATHERED_FILES),
    "sharded": (2, "dist_epoch_0", SHARDED, SHARDED_FILES),
}


def failures(files: dict[str, str], folder: Callable[[str], Path], name: str) -> dict[str, Failure]:
    """All failures of a mode, by names; the first is that weights are lost."""
    some = {
        f"{what}, {operation}": Failure(operation, part, ERRORS[operation])
        for what, part in files.items()
        for operation in ("lost", "open", "write", "close", "fsync")
        if (what, operation) not in (("copied", "lost"), ("copied", "write"))  # the kernel copies
    }
    some["folder, rename"] = Failure("rename", f"{folder('folder, rename')}/{name}", errno.EIO)
    return some


@pytest.mark.parametrize("mode", MODES)
def test_a_disk_that_fails_in_a_save(
    mode: str, tmp_path: Path, exhaustive: bool, shard: int
) -> None:
    ranks, name, how, files = MODES[mode]
    whole, expected = undisturbed("full", ranks, **SAVES, **how, **ALL_KEPT)

    def folder(case: str) -> Path:
        return tmp_path / case.replace(", ", "_").replace(" ", "_")

    found = failures(files, folder, name)
    if not exhaustive:
        first, *others = found
        case = first if mode == "gathered" else others[shard % len(others)]
        found = {case: found[case]}
    changes = {**SAVES, **how, **ALL_KEPT}
    runs = [
        (failure, stopped_after(2, whole, folder(case)), {**changes, **RESUME})
        for case, failure in found.items()
    ]
    said = failing_runs(library(tmp_path), runs, ranks)
    for (case, failure), text in zip(found.items(), said, strict=True):
        at = folder(case)
        why = f"could not be written to {at} ({os.strerror(failure.error)}"
        assert f"CheckpointError: The checkpoint {name} {why}" in text, f"{case}: {text}"
        is_sealed = failure.operation == "rename"
        assert is_sealed or f"The last one is {at}/epoch_0_step_2" in text, case
        assert "Exception in thread" not in text, case
        assert (at / ".saving").exists() == is_sealed, case
        resumed = train("full", at, ranks, **changes, **RESUME)
        assert len(resumed) == (3 if is_sealed else 4), f"{case}: resumed from the wrong one"
        assert_same_end(resumed, expected)
        assert_same_weights(whole / "epoch_1", at / "epoch_1")


def fail_on_one_rank(folder: Path) -> bool:
    """A save that fails on rank 1; whether rank 0 has undone it when this rank ends by the error."""
    ranks = Ranks()
    together, gone = AllOrNone(ranks), folder / "gone"

    def undo() -> None:
        if ranks.is_zero:
            time.sleep(1)  # as deleting many files takes
            gone.touch()

    def save() -> None:
        with together.undone_by(undo), together.together(str):
            if ranks.rank == 1:
                raise OSError("rank 1 is full")

    with pytest.raises(CheckpointError, match="rank 1 is full"):
        save()
    return gone.exists()


def test_no_rank_ends_before_what_was_written_is_deleted(tmp_path: Path) -> None:
    assert run_ranks(fail_on_one_rank, 2, tmp_path) == [True, True]


def run_and_record(cfg: DictConfig) -> list[str]:
    """What a loss of power may take of the checkpoints of a run, and which flushes are not needed."""
    out = Path(cfg.output_dir)
    operations = record_operations()
    run_ours("full", cfg)
    done = [*operations, ("end", out, None)]
    problems = what_power_may_take(done, out)
    for at, (kind, path, _) in enumerate(done):
        is_twice = path.name.startswith(".metadata")  # by its writer, and as others that are small
        if kind == "flush" and path.is_relative_to(out / ".saving") and not is_twice:
            without = done[:at] + done[at + 1 :]
            if not what_power_may_take(without, out):
                problems.append(f"not needed: {path}")
    return problems


@pytest.mark.parametrize("how", ["gathered", "sharded", "in files"])
def test_what_runs_save_outlives_a_loss_of_power(how: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {**SAVES, **({} if how == "gathered" else SHARDED)}
    if how == "in files":
        changes |= in_files(tmp_path, 2)
    cfg = tiny_config("full", tmp_path / "above" / "out", **changes)
    assert run_ranks(run_and_record, 1, cfg, join=False) == [[]]
