"""Checkpoints that runs resume from, or refuse, or cannot save: whole runs of the recipes."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from omegaconf import DictConfig
from torchtune.training.checkpointing import _checkpointer

from tests.helpers import runs
from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.recipes import in_files, run_ours, run_torchtunes, tiny_config
from tests.helpers.runs import (
    ALL_KEPT,
    ASYNCHRONOUS,
    RESUME,
    SHORT,
    Records,
    assert_same_end,
    assert_same_records,
    assert_same_weights,
    losses,
    stopped_after,
    train,
    undisturbed,
)
from tests.helpers.snapshots import EVERY, run_killed
from torchtune_adaptive.common import FolderLock, durable
from torchtune_adaptive.recipe.checkpoints import sharded
from torchtune_adaptive.recipe.checkpoints.checkpoints import Checkpoints
from torchtune_adaptive.recipe.checkpoints.folder import CheckpointFolder

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

refused = partial(runs.refused, "CheckpointError")


# --- what is resumed from ---------------------------------------------------------------------------


@pytest.mark.rotating
@pytest.mark.parametrize(("kind", "ranks"), [("full", 1), ("lora", 2)])
def test_a_run_that_is_finished_and_gets_more_epochs(kind: str, ranks: int, tmp_path: Path) -> None:
    """With a constant rate it is the longer run; a schedule would have been another one."""
    changes = {"lr_scheduler": None, "max_steps_per_epoch": 2}
    whole, expected = undisturbed(kind, ranks, epochs=2, **changes)
    first = train(kind, tmp_path, ranks, epochs=1, **changes)
    cfg = tiny_config(kind, tmp_path, epochs=1, **changes, **RESUME)
    again = watch_ranks(run_ours, ranks, kind, cfg, until_exit_of=[*range(ranks)], join=False)
    assert [rank.exit_code for rank in again] == [0] * ranks
    said = f"The run is finished, nothing to do: {tmp_path}/epoch_0 has 1 epoch."
    assert said in again[0].said
    more = train(kind, tmp_path, ranks, epochs=2, **changes, **RESUME)
    assert_same_records(first + more, expected)
    assert_same_weights(whole / "epoch_1", tmp_path / "epoch_1")


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_resuming_without_naming_a_file(kind: str, tmp_path: Path) -> None:
    changes = {**SHORT, "keep_last_n_checkpoints": 3}
    cfg = tiny_config(kind, tmp_path, **changes, **RESUME)
    (first,) = watch_ranks(run_ours, 1, kind, cfg, until_exit_of=[0], join=False)
    assert "there is no checkpoint in" in first.said and "from the beginning" in first.said
    assert {path.name for path in tmp_path.glob("epoch_*")} == {
        "epoch_1",
        "epoch_1_step_8",
        "epoch_1_step_6",
    }
    weights = next((tmp_path / "epoch_1_step_8").glob("*.pt"))
    os.truncate(weights, 100)
    (tmp_path / "epoch_1" / "recipe_state.pt").unlink()
    (tmp_path / ".saving" / "epoch_2").mkdir(parents=True)
    cfg.epochs = 3  # or the run would be finished
    (again,) = watch_ranks(run_ours, 1, kind, cfg, until_exit_of=[0], join=False)
    (line,) = re.findall(r"Resuming from .*", again.said)
    assert f"{tmp_path}/epoch_1_step_6 (step 6). Skipped: " in line
    assert "epoch_2 (its run ended while saving it)" in line
    assert "epoch_1 (its recipe state is missing" in line
    assert f"epoch_1_step_8 ({weights.name} is truncated" in line
    assert again.exit_code == 0


@pytest.mark.rotating
@pytest.mark.parametrize("more", [{}, {"adaptive_batching.sharded_checkpoints": True}])
def test_by_default_there_is_one_before_the_newest(more: dict[str, Any], tmp_path: Path) -> None:
    whole, expected = undisturbed("full", max_steps_per_epoch=6)
    changes = {"max_steps_per_epoch": 6, "save_every_n_steps": 2, **more}
    cfg = tiny_config("full", tmp_path, **changes, **RESUME)
    watch_ranks(run_killed, 1, "full", cfg, 5, until_exit_of=[0], join=False)
    assert {path.name for path in tmp_path.glob("*epoch_*")} == {"epoch_0_step_2", "epoch_0_step_4"}
    damaged = max((tmp_path / "epoch_0_step_4").iterdir(), key=lambda file: file.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[::-1])
    resumed = watch_ranks(run_and_tell, 1, "full", cfg, until_exit_of=[0], join=False)
    said = rf"Resuming from .*/epoch_0_step_2 \(step 2\)\. Skipped: epoch_0_step_4 \({damaged.name} is corr"
    assert re.search(said, resumed[0].said)
    assert_same_end(json.loads(resumed[0].said.splitlines()[-1]), expected)
    assert_same_weights(whole / "epoch_0", tmp_path / "epoch_0")


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_file_that_nobody_reads_may_be_damaged(kind: str, tmp_path: Path) -> None:
    """A copy of the base model's, and of adapters the merged weights."""
    changes = {**SHORT, **ALL_KEPT}
    whole, expected = undisturbed(kind, **changes)
    out = stopped_after(2, whole, tmp_path / "out")
    (out / "epoch_0_step_2" / "data.json").unlink()
    (out / "epoch_0_step_2" / "data.json").symlink_to("data.json")
    if kind == "lora":
        (out / "epoch_0_step_2" / "model-00001-of-00001.safetensors").unlink()
    assert_same_end(train(kind, out, **changes, **RESUME), expected)


def test_torchtune_reads_what_is_published(tmp_path: Path) -> None:
    """As a model to start from, and to resume."""
    expected = train("full", tmp_path / "out", epochs=2, keep_last_n_checkpoints=2)
    start = {
        "checkpointer.checkpoint_dir": str(tmp_path / "out" / "epoch_0"),
        "checkpointer.checkpoint_files": ["model-00001-of-00001.safetensors"],
    }
    cfg = tiny_config("full", tmp_path / "next", **start)
    run_ranks(run_torchtunes, 1, "full", cfg, join=False)
    assert not list((tmp_path / "next").rglob(durable.MANIFEST)), "not copied by torchtune"
    named = {
        "checkpointer.checkpoint_files": ["epoch_0/model-00001-of-00001.safetensors"],
        "checkpointer.recipe_checkpoint": "epoch_0/recipe_state.pt",
    }
    cfg = tiny_config("full", tmp_path / "out", epochs=2, **named, **RESUME)
    records, *_ = run_ranks(run_torchtunes, 1, "full", cfg, join=False)
    assert losses(records) == losses(expected)[-3:]


def test_weights_and_state_of_different_checkpoints(tmp_path: Path) -> None:
    train("full", tmp_path, **SHORT, keep_last_n_checkpoints=5)
    names = {
        "checkpointer.checkpoint_files": ["epoch_0/model-00001-of-00001.safetensors"],
        "checkpointer.recipe_checkpoint": "epoch_1_step_6/recipe_state.pt",
    }
    said = refused("full", tmp_path, **SHORT, **RESUME, **names)
    assert "belongs to another checkpoint than" in said


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "weights truncated": ({"file": "model-00001-of-00001.safetensors", "size": 999}, "truncated"),
    "state empty": ({"file": "recipe_state.pt", "size": 0}, "is empty"),
}


@pytest.mark.parametrize(("damage", "said"), BROKEN.values(), ids=BROKEN)
def test_the_only_checkpoint_is_damaged(damage: dict[str, Any], said: str, tmp_path: Path) -> None:
    whole, _ = undisturbed("full", max_steps_per_epoch=1)
    shutil.copytree(whole, tmp_path, symlinks=True, dirs_exist_ok=True)
    os.truncate(tmp_path / "epoch_0" / damage["file"], damage["size"])
    message = refused("full", tmp_path, 2, epochs=3, **RESUME)
    assert "none of the checkpoints can be resumed from" in message and said in message


def test_a_base_model_that_is_damaged_or_missing(tmp_path: Path) -> None:
    base = tmp_path / "base"
    assets = Path(tiny_config("full", tmp_path).checkpointer.checkpoint_dir)
    shutil.copytree(assets, base)
    weights = base / "model-00001-of-00001.safetensors"
    os.truncate(weights, 5000)
    change = {"checkpointer.checkpoint_dir": str(base)}
    said = refused("full", tmp_path / "out", 2, **change)
    assert "The checkpoint to start from cannot be read" in said and weights.name in said
    weights.unlink()
    assert weights.name in refused("full", tmp_path / "out", **change)
    change = {"checkpointer.checkpoint_dir": str(tmp_path / "nowhere")}
    assert "nowhere/config.json" in refused("full", tmp_path / "out", **change)


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    said = refused("full", tmp_path / "full", 2, **{"model.intermediate_dim": 96})
    assert "does not fit the model: layers.0.mlp" in said
    said = refused("full", tmp_path / "full", **{"model.num_layers": 5})
    assert "layers.4" in said and "is missing in the checkpoint" in said
    train("lora", tmp_path / "lora", **SHORT, keep_last_n_checkpoints=2)
    longer = {**SHORT, "epochs": 3, "model.lora_rank": 4}
    said = refused("lora", tmp_path / "lora", **longer, **RESUME)
    assert "does not fit the model: layers.0.attn" in said and "lora_a" in said


def run_without_its_base(kind: str, cfg: DictConfig) -> Records:
    """A run whose base model cannot be read, although its files can be listed."""

    def fail(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    _checkpointer.safe_torch_load = fail  # type: ignore[assignment]
    return run_ours(kind, cfg)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("ranks", "saved"), [(1, "checkpoint"), (2, "checkpoint"), (2, "snapshot")]
)
def test_a_sharded_checkpoint_of_a_whole_model_needs_no_base(
    ranks: int, saved: str, tmp_path: Path
) -> None:
    """It is in several files, as the weights at the end are."""
    changes = {
        **{"max_steps_per_epoch": 4, "save_every_n_steps": 2, **ALL_KEPT},
        "adaptive_batching.sharded_checkpoints": True,
        **in_files(tmp_path, 2),
    }
    whole, out = tmp_path / "whole", tmp_path / "out"
    expected = train("full", whole, ranks, **changes)
    if saved == "snapshot":
        changes |= {EVERY: 1, "adaptive_batching.snapshot_folder": str(tmp_path / "memory")}
        arguments = ("full", tiny_config("full", out, **changes), 3)
        ranks_of = [*range(ranks)]
        watch_ranks(run_killed, ranks, *arguments, until_exit_of=ranks_of, join=False)
    else:
        stopped_after(2, whole, out)
    cfg = tiny_config("full", out, **changes, **RESUME)
    resumed, *_ = run_ranks(run_without_its_base, ranks, "full", cfg, join=False)
    assert len(resumed) == (1 if saved == "snapshot" else 2)
    assert_same_end(resumed, expected)
    assert_same_weights(whole / "epoch_0", out / "epoch_0")
    files = [sorted(each.name for each in (at / "epoch_0").iterdir()) for at in (whole, out)]
    assert files[0] == files[1] and len([n for n in files[0] if n.endswith("tensors")]) == 2


def run_and_count_manifests(kind: str, cfg: DictConfig, folder: Path) -> int:
    """How many of the output folder's are read while snapshots are taken."""
    read, snapshot, counted = durable.read_manifest, Checkpoints.snapshot, [0]

    def read_and_count(one: Path) -> Any:
        counted[0] += one.parent == folder
        return read(one)

    def snapshot_and_count(self: Checkpoints, *arguments: Any) -> None:
        with mock.patch.object(durable, "read_manifest", read_and_count):
            snapshot(self, *arguments)

    Checkpoints.snapshot = snapshot_and_count  # type: ignore[method-assign]
    run_ours(kind, cfg)
    return counted[0]


def test_a_snapshot_reads_no_manifests_of_checkpoints(tmp_path: Path) -> None:
    """Only the first looks which checkpoint is the newest."""
    changes = {"max_steps_per_epoch": 6, "save_every_n_steps": 2, EVERY: 1, **ALL_KEPT}
    memory = {"adaptive_batching.snapshot_folder": str(tmp_path / "memory")}
    out = tmp_path / "out"
    shutil.copytree(undisturbed("full", **SHORT, **ALL_KEPT)[0], out, symlinks=True)
    earlier = len([*out.glob("epoch_*")])
    cfg = tiny_config("full", out, **changes, **memory)
    (read,) = run_ranks(run_and_count_manifests, 1, "full", cfg, out, join=False)
    assert read == earlier


def test_adapters_need_their_base(tmp_path: Path) -> None:
    changes = {**SHORT, **ALL_KEPT, "adaptive_batching.sharded_checkpoints": True}
    whole, _ = undisturbed("lora", **changes)
    cfg = tiny_config("lora", stopped_after(2, whole, tmp_path / "out"), **changes, **RESUME)
    with pytest.raises(AssertionError, match=r"CheckpointError: .* cannot be read: Input/output"):
        run_ranks(run_without_its_base, 1, "lora", cfg, join=False)


# --- what has changed in the config -----------------------------------------------------------------


STOPPED = {"save_every_n_steps": 2, "max_steps_per_epoch": 3, "epochs": 2, **ALL_KEPT}


def stopped_after_two_steps(kind: str, folder: Path, ranks: int, **changes: Any) -> None:
    """A copy of a run as it was after its first checkpoint."""
    whole, _ = undisturbed(kind, ranks, **STOPPED, **changes)
    shutil.copytree(whole, folder, symlinks=True)
    for saved in {path.name for path in folder.glob("*epoch_*")} - {"epoch_0_step_2"}:
        shutil.rmtree(folder / saved)


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_learning_rate_that_is_changed_on_purpose(kind: str, tmp_path: Path) -> None:
    """It is that of a run that has it from the beginning, to the bit; resumed again, it goes on."""
    lower = {"optimizer.lr": 1e-4}
    _, expected = undisturbed(kind, **STOPPED, **lower)
    stopped_after_two_steps(kind, tmp_path / "first", 1)
    taken = {"adaptive_batching.resume_learning_rate": "config"}
    cfg = tiny_config(kind, tmp_path / "first", **STOPPED, **RESUME, **lower, **taken)
    (first,) = watch_ranks(run_and_tell, 1, kind, cfg, until_exit_of=[0], join=False)
    rate = tiny_config(kind, tmp_path).optimizer.lr
    assert f"optimizer.lr {rate} -> 0.0001 (the config's)" in first.said
    records = json.loads(first.said.splitlines()[-1])
    assert [one["lr"] for one in records] == [one["lr"] for one in expected[2:]]
    for name in ("epoch_0_step_6", "epoch_1", "epoch_1_step_6"):
        shutil.rmtree(tmp_path / "first" / name, ignore_errors=True)
    again = train(kind, tmp_path / "first", **STOPPED, **RESUME, **lower, **taken)
    assert len(again) == 2
    assert_same_records(again, records[-2:])


def run_and_tell(kind: str, cfg: DictConfig) -> None:
    records = run_ours(kind, cfg)
    print(json.dumps(records))


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer._component_": "torch.optim.SGD"}, "optimizer._component_: torch.optim.SGD"),
        ({"dataset.split": "train[:50%]"}, "in the middle of an epoch of"),
        ({"optimizer_in_bwd": True}, "optimizer_in_bwd: True cannot continue"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"enable_async_checkpointing": True}])
def test_what_cannot_be_continued(
    changes: dict[str, Any], said: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """On no rank; an asynchronous checkpoint, too, except for data, since it ends an epoch."""
    if more:
        first = {**ASYNCHRONOUS, "epochs": 2}
        whole, _ = undisturbed("full", 2, **first)
        shutil.copytree(whole, tmp_path / "run", symlinks=True)
        shutil.rmtree(tmp_path / "run" / "epoch_1")
        if "dataset.split" in changes:
            assert len(train("full", tmp_path / "run", 2, **first, **RESUME, **changes)) == 2
            return
    else:
        first = STOPPED
        stopped_after_two_steps("full", tmp_path / "run", 2)
    assert said in refused("full", tmp_path / "run", 2, **first, **RESUME, **changes)


# --- what is saved ------------------------------------------------------------------------------------


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["lora", "lora_dpo", "full"])
def test_saving_changes_no_bit_of_training(kind: str, tmp_path: Path) -> None:
    """On a CPU what is gathered are the parameters themselves, into which adapters must not be merged."""
    _, expected = undisturbed(kind)
    assert_same_records(train(kind, tmp_path, save_every_n_steps=1), expected)


# --- what cannot be saved ---------------------------------------------------------------------------


def run_on_a_full_disk(kind: str, cfg: DictConfig, save: int, writer: str) -> None:
    """A run whose disk is full from one of its saves on, as the library reports it that writes the file; or
    whose files cannot grow, so that they end in the middle."""
    no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file")
    no_space_for_copy = OSError(errno.ENOSPC, no_space.strerror, "healthy", None, "full/copy")
    errors: dict[str, tuple[Any, str, Exception]] = {
        "manifest": (durable, "atomically", no_space),
        "rename": (durable, "publish", no_space),
        "copy": (shutil, "copy2", no_space_for_copy),
        "state": (torch, "save", RuntimeError("[enforce fail] write failed\nat")),
        "distributed": (sharded.FileSystemWriter, "write_data", no_space),
        "distributed on rank 1": (sharded.FileSystemWriter, "write_data", no_space),
    }
    kib_of_files = {"in the middle of weights": 500, "in the middle of the state": 1500}
    owner, name, error = errors.get(writer) or (None, "", no_space)
    begin = CheckpointFolder.begin
    saves = count(1)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    def begin_and_fail(self: CheckpointFolder, folder: str) -> Path:
        if writer != "distributed on rank 1" and next(saves) == save:
            if owner is None:
                _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (kib_of_files[writer] << 10, most))
            else:
                setattr(owner, name, fail)
        return begin(self, folder)

    CheckpointFolder.begin = begin_and_fail  # type: ignore[method-assign]
    if writer == "distributed on rank 1" and os.environ["RANK"] == "1":
        write = owner.write_data

        def write_or_fail(*arguments: Any) -> Any:
            return fail() if next(saves) == save else write(*arguments)

        owner.write_data = write_or_fail
    run_ours(kind, cfg)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "writer",
    [
        "distributed",
        "distributed on rank 1",
        "manifest",
        "copy",
        "state",
        "in the middle of weights",
        "in the middle of the state",
    ],
)
def test_a_disk_that_is_full_at_the_second_checkpoint(writer: str, tmp_path: Path) -> None:
    asynchronous = writer.startswith("distributed")
    changes = ASYNCHRONOUS if asynchronous else SHORT
    cfg = tiny_config("full", tmp_path, **changes)
    with pytest.raises(AssertionError, match="CheckpointError") as raised:
        run_ranks(run_on_a_full_disk, 2, "full", cfg, 2, writer, join=False)
    said = str(raised.value)
    first = "dist_epoch_0" if asynchronous else "epoch_0_step_2"
    second = "dist_epoch_1" if asynchronous else "epoch_0_step_4"
    assert f"The checkpoint {second} could not be written to {tmp_path} (" in said
    assert re.search(r"; \d+(\.\d+)? [KMGT]?i?B free\)", said)
    assert f"The last one is {tmp_path}/{first}" in said
    reasons = {
        "state": "write failed",
        "copy": "No space left on device: full/copy;",
        "in the middle of weights": "File too large",
        "in the middle of the state": "File too large",
    }
    assert reasons.get(writer, "No space left on device") in said
    assert {p.name for p in tmp_path.glob("*epoch_*")} == {first}
    found, _ = CheckpointFolder(tmp_path).newest("full")
    assert found is not None and found.name == first
    assert not (tmp_path / ".saving").exists(), "the space has been given back"
    resumed = train("full", tmp_path, 2, **changes, **RESUME)
    _, whole = undisturbed("full", 2, **changes)
    assert_same_end(resumed, whole)


def test_a_checkpoint_that_is_whole_but_not_published_is_named_and_resumed(tmp_path: Path) -> None:
    cfg = tiny_config("full", tmp_path, **SHORT)
    with pytest.raises(AssertionError, match="CheckpointError") as raised:
        run_ranks(run_on_a_full_disk, 1, "full", cfg, 2, "rename", join=False)
    last = rf"The last one is {tmp_path}/.saving/epoch_0_step_4: .* and resume with resume_from_checkpoint"
    assert re.search(last, str(raised.value))
    resumed = train("full", tmp_path, **SHORT, **RESUME)
    assert [record["step"] for record in resumed] == [5, 6, 7, 8]
    assert_same_end(resumed, undisturbed("full", **SHORT)[1])


def test_a_disk_that_is_full_at_the_end(tmp_path: Path) -> None:
    """The recipe state is most of a checkpoint, and the weights alone are what the run was for."""
    cfg = tiny_config("full", tmp_path, max_steps_per_epoch=1)
    arguments = (2, "full", cfg, 1, "state")
    first, _ = watch_ranks(run_on_a_full_disk, *arguments, until_exit_of=[0, 1], join=False)
    assert first.exit_code == 0, first.said
    assert "epoch_0 is saved without its recipe state (RuntimeError: [enforce fail]" in first.said
    assert list((tmp_path / "epoch_0").glob("*.safetensors"))
    assert not list((tmp_path / "epoch_0").glob("*.pt")) and not (tmp_path / ".saving").exists()
    said = refused("full", tmp_path, max_steps_per_epoch=1, epochs=2, **RESUME)
    assert "epoch_0 (it is the end of a run, saved without its recipe state)" in said
    assert "or train on from the weights of one" in said


@pytest.mark.parametrize(
    ("writer", "reason"),
    [
        ("copy", "No space left on device: full/copy"),
        ("in the middle of weights", "File too large: "),
    ],
)
def test_a_disk_that_is_full_even_for_the_weights(writer: str, reason: str, tmp_path: Path) -> None:
    cfg = tiny_config("full", tmp_path, max_steps_per_epoch=1)
    arguments = (1, "full", cfg, 1, writer)
    (run,) = watch_ranks(run_on_a_full_disk, *arguments, until_exit_of=[0], join=False)
    assert run.exit_code != 0
    assert f"The checkpoint epoch_0 could not be written to {tmp_path} ({reason}" in run.said
    assert "There is no earlier checkpoint: make room, or make the folder writable" in run.said
    assert "is saved" not in run.said
    assert not list(tmp_path.glob("epoch_*")) and not (tmp_path / ".saving").exists()


def test_what_is_written_for_nothing_takes_no_room_from_the_weights(tmp_path: Path) -> None:
    """A file that is deleted takes up room as long as it is open."""
    cfg = tiny_config("full", tmp_path, max_steps_per_epoch=1)
    arguments = (1, "full", cfg, tmp_path)
    (run,) = watch_ranks(run_and_look_for_open_files, *arguments, until_exit_of=[0], join=False)
    assert run.exit_code == 0, run.said
    assert "epoch_0 is saved without its recipe state (File too large: " in run.said
    assert "open: 0" in run.said and "open: 1" not in run.said


def run_and_look_for_open_files(kind: str, cfg: DictConfig, folder: Path) -> None:
    """A run whose recipe state is too large for its disk; it tells what is open at each save."""
    begin = CheckpointFolder.begin

    def tell_and_begin(self: CheckpointFolder, name: str) -> Path:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500 << 10, most))
        links = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
        print("open:", sum(str(folder / ".saving") in link for link in links), flush=True)
        return begin(self, name)

    CheckpointFolder.begin = tell_and_begin  # type: ignore[method-assign]
    run_ours(kind, cfg)


def test_a_folder_that_another_run_uses(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    assert f"{tmp_path}: another run is using it" in refused("full", tmp_path, 2)
    lock.release()


def test_an_output_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = refused("full", tmp_path / "file" / "out", 2)
    assert "file/out: cannot be written to (Not a directory). Set output_dir" in said
