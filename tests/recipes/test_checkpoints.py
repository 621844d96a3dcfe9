"""Runs that are killed while they save, and checkpoints that are damaged: whole runs of the recipes."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from tests.helpers.killing import KillAt, in_child
from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.recipes import run_ours, run_torchtunes, saved_weights, tiny_config
from tests.recipes.test_growth import WITHIN_EPOCHS
from torchtune_adaptive import durable
from torchtune_adaptive.checkpoints import asynchronous
from torchtune_adaptive.checkpoints.checkpoints import Checkpoints
from torchtune_adaptive.checkpoints.folder import CheckpointFolder

SHORT = {"save_every_n_steps": 2, "max_steps_per_epoch": 4, "epochs": 2}
ASYNCHRONOUS = {"enable_async_checkpointing": True, "max_steps_per_epoch": 2, "epochs": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", SHORT),
    "lora": ("lora", {**SHORT, "model.lora_dropout": 0.1}),
    "adapters only": ("lora", {**SHORT, "save_adapter_weights_only": True}),
    "preference": ("full_dpo", SHORT),
    "preference, adapters only": ("lora_dpo", {**SHORT, "save_adapter_weights_only": True}),
    "distillation": ("kd", SHORT),
    "quantised later": ("qat", {**SHORT, "fake_quant_after_n_steps": 3}),
    "quantised later, lora": ("qat_lora", {**SHORT, "fake_quant_after_n_steps": 3}),
    "growth": ("full", {**WITHIN_EPOCHS, "save_every_n_steps": 5, "epochs": 2}),
    "token budget": ("full", {**SHORT, "adaptive_batching.token_budget": 400}),
}
QUICK_CASES = ("full", "lora", "token budget")
RESUME = {"resume_from_checkpoint": True}


def train(kind: str, folder: Path, ranks: int = 1, **changes: Any) -> list[dict[str, float]]:
    cfg = tiny_config(kind, folder, **changes)
    records, *_ = run_ranks(run_ours, ranks, kind, cfg, join=False)
    return records


Undisturbed = Callable[..., tuple[Path, list[dict[str, float]]]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """What runs save and log that nothing disturbs: each is made once, for all tests that compare with it."""
    made: dict[str, tuple[Path, list[dict[str, float]]]] = {}

    def run(kind: str, ranks: int, **changes: Any) -> tuple[Path, list[dict[str, float]]]:
        key = repr((kind, ranks, changes))
        if key not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            made[key] = folder, train(kind, folder, ranks, **changes)
        return made[key]

    return run


def refused(kind: str, folder: Path, ranks: int = 1, **changes: Any) -> str:
    """What a run ends with that cannot start, or cannot go on."""
    with pytest.raises(AssertionError, match="CheckpointError: ") as raised:
        train(kind, folder, ranks, **changes)
    return str(raised.value)


def same(one: list[dict[str, float]], other: list[dict[str, float]]) -> bool:
    """Whether two runs logged the same, the speed of the machine apart."""
    machine = {"tokens_per_second_per_gpu", "memory_unused_share"}
    return [{k: v for k, v in r.items() if k not in machine} for r in one] == [
        {k: v for k, v in r.items() if k not in machine} for r in other
    ]


def same_weights(folder: Path, other: Path, name: str) -> bool:
    ours, theirs = saved_weights(folder / name), saved_weights(other / name)
    return bool(ours) and all(torch.equal(ours[key], theirs[key]) for key in ours)


# --- killed while saving ----------------------------------------------------------------------------


def save_and_be_killed(
    kind: str, cfg: DictConfig, at_save: int, folder: Path, stride: int, shard: int
) -> list[int]:
    """A run that forks in one of its saves: each child does that save in a copy, and is killed in it."""
    write = Checkpoints._write
    saves = count(1)
    endings: list[int] = []

    def attacked(self: Checkpoints, work: Callable[[], None], name: str) -> None:
        if next(saves) != at_save:
            return write(self, work, name)
        out = Path(cfg.output_dir)
        shutil.copytree(out, folder / "before", symlinks=True)

        def save_a_copy(number: int) -> None:
            copy = folder / f"killed_{number}"
            shutil.copytree(out, copy, symlinks=True)
            self._folder = CheckpointFolder(copy)
            self._checkpointer._output_dir = copy / ".saving"
            KillAt(number)
            work()

        for number in count(1 + shard % stride, stride):
            endings.append(in_child(lambda number=number: save_a_copy(number)))
            if endings[-1] != -signal.SIGKILL:
                break
        write(self, work, name)
        shutil.copytree(out, folder / "after", symlinks=True)

    Checkpoints._write = attacked  # type: ignore[method-assign]
    run_ours(kind, cfg)
    return endings


def kill_at_every_operation(
    kind: str, folder: Path, changes: dict[str, Any], at_save: int, stride: int, shard: int
) -> None:
    cfg = tiny_config(kind, folder / "out", **changes)
    (endings,) = run_ranks(
        save_and_be_killed, 1, kind, cfg, at_save, folder, stride, shard, join=False, timeout=600
    )
    assert endings[-1] == 0 and set(endings[:-1]) == {-signal.SIGKILL}
    assert len(endings) * stride > 40, "operations of a save"
    before, after = (
        CheckpointFolder(folder / name).newest(kind, lambda _: True)[0]
        for name in ("before", "after")
    )
    assert before is not None and after is not None and before.name != after.name
    expected = {one.name: one.manifest for one in (before, after)}
    seen = set()
    for copy in folder.glob("killed_*"):
        found, _ = CheckpointFolder(copy).newest(kind, lambda _: True)
        assert found is not None, f"{copy.name}: the run is lost"
        assert found.manifest == expected[found.name], "exactly what an undisturbed run saved"
        seen.add(found.name)
    assert seen == expected.keys()


@pytest.mark.parametrize("at_save", [2, 3], ids=["mid-epoch", "epoch"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param(*case, id=name, marks=[] if name in QUICK_CASES else pytest.mark.exhaustive)
        for name, case in CASES.items()
    ],
)
def test_a_save_that_is_killed_leaves_the_checkpoint_before_or_the_new_one(
    kind: str, changes: dict[str, Any], at_save: int, tmp_path: Path, exhaustive: bool, shard: int
) -> None:
    kill_at_every_operation(kind, tmp_path, changes, at_save, 1 if exhaustive else 13, shard)


def run_killed_at(kind: str, cfg: DictConfig, method: str, number: int) -> None:
    """A run that is killed in its second save, at an operation counted from where a method is called."""
    original = getattr(CheckpointFolder, method)
    saves = count(1)

    def call_and_be_killed(*arguments: Any) -> Any:
        if next(saves) == 2:
            KillAt(number)
        return original(*arguments)

    setattr(CheckpointFolder, method, call_and_be_killed)
    run_ours(kind, cfg)


@pytest.mark.parametrize(
    ("kind", "changes", "method", "number"),
    [
        ("full", ASYNCHRONOUS, "begin", 5),
        ("full", ASYNCHRONOUS, "begin", 60),
        ("full", ASYNCHRONOUS, "publish", 5),
        ("full", ASYNCHRONOUS, "publish", 10),
        pytest.param("lora", CASES["lora"][1], "begin", 20, marks=pytest.mark.exhaustive),
        *(
            pytest.param("full", ASYNCHRONOUS, method, number, marks=pytest.mark.exhaustive)
            for method, numbers in {"begin": range(1, 90), "publish": range(1, 13)}.items()
            for number in numbers
        ),
    ],
)
def test_a_run_that_is_killed_while_it_saves_resumes_exactly(
    kind: str,
    changes: dict[str, Any],
    method: str,
    number: int,
    undisturbed: Undisturbed,
    tmp_path: Path,
) -> None:
    """On two ranks; all but the last save asynchronously."""
    whole, expected = undisturbed(kind, 2, **changes)
    killed = tmp_path / "killed"
    cfg = tiny_config(kind, killed, **changes)
    ended, _ = watch_ranks(
        run_killed_at, 2, kind, cfg, method, number, until_exit_of=[0], timeout=60, join=False
    )
    assert ended.exit_code == -signal.SIGKILL, ended.said
    last = f"epoch_{changes['epochs'] - 1}"
    CheckpointFolder(killed).newest(kind, lambda _: True)  # completes what was sealed
    if not (killed / last).exists():  # or it was killed after its last checkpoint, and is finished
        resumed = train(kind, killed, 2, **changes, **RESUME)
        assert resumed and same(resumed, expected[-len(resumed) :])
    assert same_weights(whole, killed, last)
    assert not (killed / ".saving").exists()


def run_and_die(cfg: DictConfig, delay: float) -> None:
    begin = CheckpointFolder.begin

    def begin_to_die(self: CheckpointFolder, name: str) -> Path:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        CheckpointFolder.begin = begin  # type: ignore[method-assign]
        return begin(self, name)

    CheckpointFolder.begin = begin_to_die  # type: ignore[method-assign]
    run_ours("full", cfg)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 20))]
)
def test_a_run_that_is_killed_at_random_moments(
    seed: int, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """It saves after every step, and is resumed until it is done."""
    changes = {"save_every_n_steps": 1, "max_steps_per_epoch": 20, "epochs": 2}
    whole, expected = undisturbed("full", 1, **changes)
    killed = tmp_path / "killed"
    moment = random.Random(seed)
    for _ in range(3):
        delay = moment.uniform(0.0, 0.4)
        cfg = tiny_config("full", killed, **changes, **RESUME)
        watch_ranks(run_and_die, 1, cfg, delay, until_exit_of=[0], timeout=60, join=False)
        CheckpointFolder(killed).newest("full", lambda _: True)  # completes what was sealed
        if (killed / "epoch_1").exists():
            break  # too late: it was done
    else:
        resumed = train("full", killed, **changes, **RESUME)
        assert same(resumed, expected[len(expected) - len(resumed) :])
    assert same_weights(whole, killed, "epoch_1")


# --- what is resumed from ---------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_run_that_is_finished(epochs: int, tmp_path: Path) -> None:
    """Even where an earlier epoch could be resumed from, which would train the last one again."""
    train("full", tmp_path, epochs=epochs)
    said = refused("full", tmp_path, epochs=epochs, **RESUME)
    assert f"{tmp_path}: the run is finished, and epoch_{epochs - 1} is its end" in said


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
    (tmp_path / ".saving" / "epoch_2").mkdir(parents=True)
    cfg.epochs = 3  # or the run would be finished
    (again,) = watch_ranks(run_ours, 1, kind, cfg, until_exit_of=[0], join=False)
    (line,) = re.findall(r"Resuming from .*", again.said)
    assert f"{tmp_path}/epoch_1_step_6 (step 6). Skipped: " in line
    assert "epoch_2 (its run ended while saving it)" in line
    assert "epoch_1 (it is the end of a run)" in line
    assert f"epoch_1_step_8 ({weights.name} is truncated" in line
    assert again.exit_code == 0


def test_torchtune_reads_what_is_published(tmp_path: Path) -> None:
    """As a model to start from, and to resume."""
    expected = train("full", tmp_path / "out", epochs=2)
    start = {
        "checkpointer.checkpoint_dir": str(tmp_path / "out" / "epoch_0"),
        "checkpointer.checkpoint_files": ["model-00001-of-00001.safetensors"],
    }
    cfg = tiny_config("full", tmp_path / "next", epochs=1, **start)
    run_ranks(run_torchtunes, 1, "full", cfg, join=False)
    assert not list((tmp_path / "next").rglob(durable.MANIFEST)), "not copied by torchtune"
    named = {"checkpointer.checkpoint_files": ["epoch_0/model-00001-of-00001.safetensors"]}
    cfg = tiny_config("full", tmp_path / "out", epochs=2, **named, **RESUME)
    records, *_ = run_ranks(run_torchtunes, 1, "full", cfg, join=False)
    assert [r["loss"] for r in records] == [r["loss"] for r in expected[-3:]]


def test_weights_and_state_of_different_checkpoints(tmp_path: Path) -> None:
    train("full", tmp_path, **SHORT, keep_last_n_checkpoints=5)
    names = {
        "checkpointer.checkpoint_files": ["epoch_0/model-00001-of-00001.safetensors"],
        "checkpointer.recipe_checkpoint": "epoch_1_step_6/recipe_state.pt",
    }
    said = refused("full", tmp_path, 2, **SHORT, **RESUME, **names)
    assert "belongs to another checkpoint than" in said


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "weights truncated": ({"file": "model-00001-of-00001.safetensors", "size": 999}, "truncated"),
    "state empty": ({"file": "recipe_state.pt", "size": 0}, "is empty"),
}


@pytest.mark.parametrize(("damage", "said"), BROKEN.values(), ids=BROKEN)
def test_the_only_checkpoint_is_damaged(damage: dict[str, Any], said: str, tmp_path: Path) -> None:
    train("full", tmp_path, epochs=2, max_steps_per_epoch=1)
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


# --- what cannot be saved ---------------------------------------------------------------------------


def run_on_a_full_disk(kind: str, cfg: DictConfig, save: int, writer: str) -> None:
    """A run whose disk is full from one of its saves on, as the library reports it that writes the file."""
    errors: dict[str, tuple[Any, str, Exception]] = {
        "manifest": (
            durable,
            "write_durably",
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file"),
        ),
        "state": (
            torch,
            "save",
            RuntimeError("[enforce fail] write failed\nat"),
        ),
        "distributed": (
            asynchronous.FileSystemWriter,
            "write_data",
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file"),
        ),
    }
    owner, name, error = errors[writer]
    begin = CheckpointFolder.begin
    saves = count(1)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    def begin_and_fail(self: CheckpointFolder, folder: str) -> Path:
        if next(saves) == save:
            setattr(owner, name, fail)
        return begin(self, folder)

    CheckpointFolder.begin = begin_and_fail  # type: ignore[method-assign]
    run_ours(kind, cfg)


@pytest.mark.parametrize("writer", ["manifest", "state", "distributed"])
def test_a_disk_that_is_full_at_the_second_checkpoint(writer: str, tmp_path: Path) -> None:
    asynchronous = writer == "distributed"
    changes = ASYNCHRONOUS if asynchronous else SHORT
    cfg = tiny_config("full", tmp_path, **changes)
    with pytest.raises(AssertionError, match="CheckpointError") as raised:
        run_ranks(run_on_a_full_disk, 2, "full", cfg, 2, writer, join=False)
    said = str(raised.value)
    first = "dist_epoch_0" if asynchronous else "epoch_0_step_2"
    second = "dist_epoch_1" if asynchronous else "epoch_0_step_4"
    assert f"The checkpoint {second} could not be written" in said and "GiB free" in said
    assert f"The last one is {tmp_path}/{first}" in said
    assert ("write failed" if writer == "state" else "No space left on device") in said
    assert {p.name for p in tmp_path.glob("*epoch_*")} == {first}
    found, _ = CheckpointFolder(tmp_path).newest("full", lambda _: True)
    assert found is not None and found.name == first
    assert not list((tmp_path / ".saving").glob("*epoch*")), "the space has been given back"


def test_an_output_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = refused("full", tmp_path / "file" / "out", 2)
    assert "file/out: cannot be written to (Not a directory). Set output_dir" in said
