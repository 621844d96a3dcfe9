"""Checkpoints of which each rank writes its part: the same runs, on any ranks, and whole or not at all."""

from __future__ import annotations

import os
import shutil
import signal
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from omegaconf import DictConfig

from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.recipes import quantised, run_ours, tiny_config
from tests.helpers.runs import (
    ALL_KEPT,
    RESUME,
    assert_same_end,
    assert_same_records,
    assert_same_steps,
    assert_same_weights,
    refused,
    stopped_after,
    train,
    undisturbed,
)
from torchtune_adaptive.recipe.checkpoints import how_to_save, sharded
from torchtune_adaptive.recipe.checkpoints.folder import STATE

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

SHARDED = {"adaptive_batching.sharded_checkpoints": True}
IN_BACKGROUND = {"adaptive_batching.sharded_checkpoints": "background"}
SAVES = {"save_every_n_steps": 2, "max_steps_per_epoch": 3, "epochs": 2}
GRPO = {
    **{"dataset.split": "train[:8]", "max_generated_tokens": 8, "num_steps": 2},
    **{"batch_size": 4, "grpo_samples": 2, "epochs": 2, "max_steps_per_epoch": None},
}
PPO = {
    **{"dataset.split": "train[:8]", "max_generated_tokens": 8, "num_steps": 16},
    **{"batch_size": 4, "ppo_batch_size": 2, "epochs": 2, "max_steps_per_epoch": 1},
}
PLAN = "torchtune.models.llama3.base_llama_tp_plan"
IN_TENSORS = {"tensor_parallel_dim": 2, "tensor_parallel_plan._component_": PLAN}

RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "full": ("full", 2, SAVES),
    "alone": ("full", 1, SAVES),
    "optimizer in backward": ("full", 2, {**SAVES, "optimizer_in_bwd": True}),
    "tensor parallel": ("full", 2, {**SAVES, **IN_TENSORS}),
    "replicas": ("full", 4, {**SAVES, "data_parallel_replicate_dim": 2}),
    "lora": ("lora", 2, {**SAVES, "model.lora_dropout": 0.1}),
    "dora": ("lora", 1, {**SAVES, "model.use_dora": True}),
    "adapters only": ("lora", 2, {**SAVES, "save_adapter_weights_only": True}),
    "preference": ("full_dpo", 2, SAVES),
    "quantised later": ("qat", 2, {**SAVES, "fake_quant_after_n_steps": 3}),
    "grpo": ("grpo", 2, GRPO),
    "ppo": ("ppo", 2, PPO),
}
QUICK = {"full", "lora"}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.exhaustive) for n in RUNS]
)
def test_the_same_run_as_with_gathered_checkpoints(name: str, tmp_path: Path) -> None:
    """Resumed from each checkpoint as well, at the end to save the weights only."""
    kind, ranks, changes = RUNS[name]
    whole, expected = undisturbed(kind, ranks, **changes)
    parts, records = undisturbed(kind, ranks, **changes, **SHARDED, **ALL_KEPT)
    assert_same_records(records, expected)
    assert_same_weights(whole / "epoch_1", parts / "epoch_1")
    assert not (parts / "epoch_1" / STATE).exists()
    saved = [each for each in parts.glob("*epoch_*") if each.name != "epoch_1"]
    assert parts / "dist_epoch_1" in saved and len(saved) > 1
    for each in saved:
        assert (each / ".metadata").exists() and not (each / STATE).exists()
        out = tmp_path / each.name
        shutil.copytree(each, out / each.name)
        resumed = train(kind, out, ranks, **changes, **SHARDED, **RESUME)
        assert_same_end(resumed, expected)
        assert bool(resumed) == (each.name not in ("dist_epoch_1", "epoch_1_step_6"))
        assert_same_weights(whole / "epoch_1", out / "epoch_1")


@pytest.mark.exhaustive
def test_adapters_of_a_quantised_model(tmp_path: Path) -> None:
    """Its weights are not saved, but merged at the end."""
    changes = {**quantised(tmp_path), **SAVES, **ALL_KEPT}
    expected = train("lora", tmp_path / "gathered", 2, **changes)
    assert_same_records(train("lora", tmp_path / "sharded", 2, **changes, **SHARDED), expected)
    assert_same_weights(tmp_path / "gathered" / "epoch_1", tmp_path / "sharded" / "epoch_1")
    saved = "epoch_0_step_2"
    shutil.copytree(tmp_path / "sharded" / saved, tmp_path / "again" / saved)
    resumed = train("lora", tmp_path / "again", 2, **changes, **SHARDED, **RESUME)
    assert len(resumed) == 4
    assert_same_end(resumed, expected)


def test_more_epochs_continue_a_run_that_has_ended(tmp_path: Path) -> None:
    """Even where only the newest is kept: the weights, and what continues them."""
    once = {**SAVES, "epochs": 1, "keep_last_n_checkpoints": 1}
    train("full", tmp_path, 2, **once, **SHARDED)
    assert {each.name for each in tmp_path.glob("*epoch_*")} == {"epoch_0", "dist_epoch_0"}
    resumed = train("full", tmp_path, 2, **{**once, "epochs": 2}, **SHARDED, **RESUME)
    assert len(resumed) == 3
    assert not (tmp_path / "epoch_0").exists() and (tmp_path / "epoch_1").exists()


def test_a_gathered_checkpoint_and_a_sharded_one_follow_each_other(tmp_path: Path) -> None:
    changes = {**SAVES, **ALL_KEPT}
    whole, expected = undisturbed("full", 2, **changes)
    first = stopped_after(2, whole, tmp_path / "run")
    train("full", first, 2, **{**changes, "epochs": 1}, **SHARDED, **RESUME)
    shutil.rmtree(first / "epoch_0")
    (resumed, said) = train("full", first, 2, **changes, **RESUME), (first / "epoch_1").name
    assert_same_end(resumed, expected)
    assert_same_weights(whole / said, first / said)


# --- other ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=pytest.mark.exhaustive)])
def test_other_ranks_and_other_meshes_continue(
    kind: str, tmp_path: Path, exhaustive: bool, shard: int
) -> None:
    """From 4 ranks to one of the others, or to each of them and back."""
    changes = {
        **{"batch_size": 3, "dataset.split": "train[:60]", "epochs": 2, "clip_grad_norm": 1.0},
        **{"max_steps_per_epoch": None, "save_every_n_steps": 1, "keep_last_n_checkpoints": 20},
        **SHARDED,
    }
    whole, expected = undisturbed(kind, 4, **changes)
    saved = stopped_after(3, whole, tmp_path / "saved")
    others: dict[str, tuple[int, dict[str, Any]]] = {"2": (2, {}), "3": (3, {}), "1": (1, {})}
    if kind == "full":
        others["in tensors"] = (2, IN_TENSORS)
        others["sharded and in tensors"] = (4, IN_TENSORS)
    if not exhaustive:
        one = [*others][shard % len(others)]
        others = {one: others[one]}
    for name, (ranks, mesh) in others.items():
        out = tmp_path / name
        shutil.copytree(saved, out, symlinks=True)
        assert_same_steps(train(kind, out, ranks, **changes, **mesh, **RESUME), expected[3:])
    if not exhaustive:
        return
    back = stopped_after(5, tmp_path / next(iter(others)), tmp_path / "back")
    assert_same_steps(train(kind, back, 4, **changes, **RESUME), expected[5:])


# --- in the background --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["full", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("lora", "grpo", "ppo"))],
)
def test_saves_in_the_background(name: str, tmp_path: Path) -> None:
    """Training changes what is being written, and the copy is what it was."""
    kind, ranks, changes = RUNS[name]
    _, expected = undisturbed(kind, ranks, **changes)
    folder, records = undisturbed(kind, ranks, **changes, **IN_BACKGROUND, **ALL_KEPT)
    assert_same_records(records, expected)
    first = "epoch_0_step_2" if "save_every_n_steps" in changes else "dist_epoch_0"
    shutil.copytree(folder / first, tmp_path / first)
    resumed = train(kind, tmp_path, ranks, **changes, **IN_BACKGROUND, **RESUME)
    assert resumed
    assert_same_end(resumed, expected)


# --- what is wrong ------------------------------------------------------------------------------------


def run_killed_while_it_writes(kind: str, cfg: DictConfig, save: int) -> None:
    """A run of which rank 1 is killed while it writes its part of a checkpoint."""
    write, saves = sharded.FileSystemWriter.write_data, count(1)

    def write_or_die(*arguments: Any) -> Any:
        if next(saves) == save and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*arguments)

    sharded.FileSystemWriter.write_data = write_or_die  # type: ignore[method-assign]
    run_ours(kind, cfg)


def run_without_room_for_weights(cfg: DictConfig) -> None:
    with mock.patch.object(
        os, "posix_fallocate", side_effect=OSError(28, "No space left on device")
    ):
        run_ours("full", cfg)


def test_no_room_for_the_weights_at_the_end(tmp_path: Path) -> None:
    """All ranks say so, and the next run has the weights only to save."""
    whole, _ = undisturbed("full", 2, **SAVES)
    cfg = tiny_config("full", tmp_path, **SAVES, **SHARDED)
    with pytest.raises(AssertionError, match="CheckpointError: ") as raised:
        run_ranks(run_without_room_for_weights, 2, cfg, join=False)
    said = str(raised.value)
    assert f"The checkpoint epoch_1 could not be written to {tmp_path} (No space left" in said
    assert f"The last one is {tmp_path}/dist_epoch_1" in said
    assert train("full", tmp_path, 2, **SAVES, **SHARDED, **RESUME) == []
    assert_same_weights(whole / "epoch_1", tmp_path / "epoch_1")


@pytest.mark.parametrize("how", [SHARDED, IN_BACKGROUND], ids=["at once", "in the background"])
def test_a_rank_that_is_killed_while_it_writes(how: dict[str, Any], tmp_path: Path) -> None:
    """The other one ends by itself, and the checkpoint before is resumed from."""
    whole, expected = undisturbed("full", 2, **SAVES)
    cfg = tiny_config("full", tmp_path, **SAVES, **how)
    left, killed = watch_ranks(
        run_killed_while_it_writes, 2, "full", cfg, 2, until_exit_of=[0, 1], join=False
    )
    assert killed.exit_code == -signal.SIGKILL and left.exit_code not in (0, None), left.said
    assert {each.name for each in tmp_path.glob("*epoch_*")} == {"epoch_0_step_2"}
    resumed = train("full", tmp_path, 2, **SAVES, **how, **RESUME)
    assert len(resumed) == 4
    assert_same_end(resumed, expected)
    assert_same_weights(whole / "epoch_1", tmp_path / "epoch_1")
    assert not (tmp_path / ".saving").exists()


@pytest.mark.parametrize("file", ["__1_0.distcp", "__0_0.distcp", ".metadata", "training_state.pt"])
def test_a_damaged_file_is_found_and_an_older_checkpoint_taken(file: str, tmp_path: Path) -> None:
    changes = {**SAVES, "keep_last_n_checkpoints": 9}
    folder, expected = undisturbed("full", 2, **changes, **SHARDED)
    for name in ("epoch_0_step_2", "dist_epoch_0"):
        shutil.copytree(folder / name, tmp_path / name)
    path = tmp_path / "dist_epoch_0" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    resumed = train("full", tmp_path, 2, **changes, **SHARDED, **RESUME)
    assert len(resumed) == 4, "from the second step"
    assert_same_end(resumed, expected)


def test_all_damaged_are_named(tmp_path: Path) -> None:
    changes = {**SAVES, "keep_last_n_checkpoints": 9}
    folder, _ = undisturbed("full", 2, **changes, **SHARDED)
    shutil.copytree(folder / "dist_epoch_0", tmp_path / "dist_epoch_0")
    path = tmp_path / "dist_epoch_0" / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    said = refused("CheckpointError", "full", tmp_path, 2, **changes, **SHARDED, **RESUME)
    assert (
        "none of the checkpoints can be resumed from: dist_epoch_0 (__1_0.distcp is corrupted"
        in said
    )
    path.unlink()
    said = refused("CheckpointError", "full", tmp_path, 2, **changes, **SHARDED, **RESUME)
    assert "dist_epoch_0 (__1_0.distcp is missing)" in said


def run_on_host(cfg: DictConfig, free: int | None, machines: int, sees: bool = True) -> list[str]:
    """A run on a host with so much free memory, as on so many machines, of which each may have a folder of
    its own; the checkpoints it saves."""
    how = [mock.patch.object(how_to_save.launcher, "local_size", return_value=2 // machines)]
    if free is not None:
        how.append(mock.patch.object(how_to_save, "available_memory", return_value=free))
    how.append(mock.patch.object(how_to_save, "_FOLDER_IS_SEEN_WITHIN", 1.0))
    if not sees and os.environ["RANK"] == "1":
        cfg.output_dir += "/elsewhere"
    for each in how:
        each.start()
    run_ours("full", cfg)
    return sorted(each.name for each in Path(cfg.output_dir).glob("*epoch_*"))


@pytest.mark.parametrize(
    ("free", "machines", "sees", "asked", "sharded"),
    [
        (None, 1, True, None, False),
        (None, 2, True, None, True),
        (None, 2, False, None, False),
        (None, 2, True, False, False),
        (1 << 20, 1, True, None, True),
    ],
)
def test_what_is_chosen(
    free: int | None, machines: int, sees: bool, asked: bool | None, sharded: bool, tmp_path: Path
) -> None:
    """Sharded where gathering takes much of the host, or with several machines that share a folder."""
    how = {} if asked is None else {"adaptive_batching.sharded_checkpoints": asked}
    cfg = tiny_config("full", tmp_path, max_steps_per_epoch=1, epochs=1, **how)
    names, _ = run_ranks(run_on_host, 2, cfg, free, machines, sees, join=False)
    assert names == (["dist_epoch_0", "epoch_0"] if sharded else ["epoch_0"])


@pytest.mark.parametrize(
    ("free", "machines", "sees", "asked", "said"),
    [
        (1 << 16, 1, True, False, r"takes [\d.]+ MiB of its host \(64 KiB are free\)"),
        (None, 2, False, True, "is not the same folder on all machines"),
    ],
)
def test_what_is_refused_before_training(
    free: int | None, machines: int, sees: bool, asked: bool, said: str, tmp_path: Path
) -> None:
    cfg = tiny_config("full", tmp_path, **{"adaptive_batching.sharded_checkpoints": asked})
    with pytest.raises(AssertionError, match=f"CheckpointError: .*{said}"):
        run_ranks(run_on_host, 2, cfg, free, machines, sees, join=False)
    assert not list(tmp_path.glob("*epoch_*"))
