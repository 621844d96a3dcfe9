"""Runs that are killed while they save: a whole checkpoint is left, and they resume exactly."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from tests.helpers.killing import KillAt, in_child
from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import ASYNCHRONOUS, RESUME, SHORT, same, same_weights, train
from tests.recipes.test_growth import WITHIN_EPOCHS
from torchtune_adaptive.recipe.checkpoints.checkpoints import Checkpoints
from torchtune_adaptive.recipe.checkpoints.folder import CheckpointFolder

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

Undisturbed = Callable[..., tuple[Path, list[dict[str, float]]]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Trains without a disturbance, and returns the folder and the log; the same run is made only once."""
    made: dict[str, tuple[Path, list[dict[str, float]]]] = {}

    def run(kind: str, ranks: int, **changes: Any) -> tuple[Path, list[dict[str, float]]]:
        key = repr((kind, ranks, changes))
        if key not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            made[key] = folder, train(kind, folder, ranks, **changes)
        return made[key]

    return run


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
