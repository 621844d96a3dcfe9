"""Runs that are killed while they save: a whole checkpoint is left, and they resume exactly.

A kill is simulated by a copy of the output folder as it is before an operation on files, so that one run has
all of them. That a kill leaves what the copy has is proved by real ones.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from tests.helpers.growing import WITHIN_EPOCHS
from tests.helpers.killing import Copies, in_child, kill_at
from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.recipes import in_files, run_ours, tiny_config
from tests.helpers.runs import (
    ASYNCHRONOUS,
    RESUME,
    Records,
    assert_same_end,
    assert_same_weights,
    train,
    undisturbed,
)
from torchtune_adaptive.recipe.checkpoints.checkpoints import Checkpoints
from torchtune_adaptive.recipe.checkpoints.folder import CheckpointFolder

pytestmark = pytest.mark.runs

SAVES = {"save_every_n_steps": 2, "max_steps_per_epoch": 3, "epochs": 2}
SHARDED = {"adaptive_batching.sharded_checkpoints": True}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "full": ("full", 1, SAVES),
    "asynchronous": ("full", 2, ASYNCHRONOUS),
    "sharded": ("full", 2, {**SAVES, **SHARDED}),
    "sharded, in the background": (
        "full",
        2,
        {**SAVES, "adaptive_batching.sharded_checkpoints": "background"},
    ),
    "sharded, adapters": ("lora", 2, {**SAVES, **SHARDED}),
    "sharded, weights in files": ("full", 2, {**SAVES, **SHARDED, "files": 3}),
    "lora": ("lora", 1, {**SAVES, "model.lora_dropout": 0.1}),
    "adapters only": ("lora", 1, {**SAVES, "save_adapter_weights_only": True}),
    "dora": ("lora", 1, {**SAVES, "model.use_dora": True}),
    "preference": ("full_dpo", 1, SAVES),
    "preference, adapters only": ("lora_dpo", 1, {**SAVES, "save_adapter_weights_only": True}),
    "distillation": ("kd", 1, SAVES),
    "quantised later": ("qat", 1, {**SAVES, "fake_quant_after_n_steps": 3}),
    "quantised later, lora": ("qat_lora", 1, {**SAVES, "fake_quant_after_n_steps": 3}),
    "reinforcement, adapters only": (
        "grpo_lora",
        1,
        {
            **{"batch_size": 2, "grpo_samples": 2, "max_generated_tokens": 4, "num_steps": None},
            **{"dataset.split": "train[:6]", "save_every_n_steps": 2, "epochs": 2},
            "save_adapter_weights_only": True,
        },
    ),
    "growth": ("full", 1, {**WITHIN_EPOCHS, "save_every_n_steps": 5, "epochs": 2}),
    "token budget": ("full", 1, {**SAVES, "adaptive_batching.token_budget": 400}),
}


def what_is_resumed(kind: str, epochs: int, folder: Path) -> str:
    """The state of an output folder: which checkpoint a run resumes from, and what else is there."""
    staged = sorted(path.name for path in (folder / ".saving").glob("*epoch_*"))
    found, unfinished = CheckpointFolder(folder).newest(kind, epochs=epochs)
    if found is None:
        return "0, nothing"
    if found.epochs_run >= epochs:
        return "98, the weights are missing" if found.is_sharded else "99, the run is finished"
    return f"{found.number}, {found.name}, staged: {staged}, unfinished: {unfinished}"


def run_and_copy(
    kind: str, cfg: DictConfig, into: Path, every: int, first: int
) -> tuple[Records, list[str], dict[str, Path]]:
    """A run whose output folder is copied before each operation on files, from the first save on."""
    write = Checkpoints._write
    copies: list[Copies] = []

    def write_and_copy(self: Checkpoints, *arguments: Any) -> None:
        if not copies:
            state = partial(what_is_resumed, kind, cfg.epochs)
            mine = into / os.environ["RANK"]
            copies.append(Copies(Path(cfg.output_dir), mine, state, every, first))
        write(self, *arguments)

    Checkpoints._write = write_and_copy  # type: ignore[method-assign]
    records = run_ours(kind, cfg)
    return records, copies[0].states, copies[0].kept


def number_of(state: str) -> int:
    return int(state.partition(",")[0])


@pytest.mark.rotating
@pytest.mark.parametrize(("kind", "ranks", "changes"), CASES.values(), ids=CASES)
def test_wherever_a_run_is_killed_it_resumes_exactly(
    kind: str, ranks: int, changes: dict[str, Any], tmp_path: Path, exhaustive: bool, shard: int
) -> None:
    """The run that is copied is at once the one that nothing disturbs."""
    changes = {**changes}
    if files := changes.pop("files", None):
        changes |= in_files(tmp_path, files)
    whole, every = tmp_path / "whole", 1 if exhaustive else 5
    cfg = tiny_config(kind, whole, **changes)
    copied = run_ranks(
        run_and_copy,
        *(ranks, kind, cfg, tmp_path / "copies", every, shard % every),
        join=False,
    )
    expected = copied[0][0]
    resumable: dict[str, Path] = {}
    for _, states, kept in copied:
        # What is written in the background is fewer files for the rank that does not lead.
        least = 30 if changes == ASYNCHRONOUS else 40
        assert len(states) * every > least, "operations of several saves"
        numbers = [number_of(state) for state in states]
        assert numbers == sorted(numbers), "what was resumed from once is never lost"
        assert all("the run is finished" in state for state in states if number_of(state) == 99)
        resumable |= {s: copy for s, copy in kept.items() if 0 < number_of(s) < 99}
    if not exhaustive:  # from each checkpoint once
        resumable = {str(number_of(state)): copy for state, copy in resumable.items()}
    assert len(resumable) >= 2
    last = f"epoch_{changes['epochs'] - 1}"
    for copy in resumable.values():
        assert_same_end(train(kind, copy, ranks, **changes, **RESUME), expected)
        assert_same_weights(whole / last, copy / last)
        assert not (copy / ".saving").exists()


# --- real kills ---------------------------------------------------------------------------------------


def save_and_be_killed(cfg: DictConfig, folder: Path, stride: int, first: int) -> list[int]:
    """A run that forks in its second save: children do that save in copies of the output folder.

    One makes copies at each operation; the others are killed at one of them.
    """
    write = Checkpoints._write
    saves = count(1)
    endings: list[int] = []

    def attacked(self: Checkpoints, work: Callable[[], None], name: str) -> None:
        if next(saves) != 2:
            return write(self, work, name)
        out = Path(cfg.output_dir)

        def save_in(place: Path, prepare: Callable[[], object]) -> None:
            shutil.copytree(out, place, symlinks=True)
            self._folder = CheckpointFolder(place)
            self._checkpointer._output_dir = place / ".saving"
            prepare()
            work()

        def copy_all() -> None:
            place, numbers = folder / "copied", count(1)
            save_in(place, lambda: Copies(place, folder / "copies", lambda _: str(next(numbers))))

        endings.append(in_child(copy_all))
        for number in count(1 + first, stride):
            killed = folder / f"killed_{number}"
            endings.append(in_child(lambda at=killed, n=number: save_in(at, lambda: kill_at(n))))
            if endings[-1] != -signal.SIGKILL:
                return write(self, work, name)

    Checkpoints._write = attacked  # type: ignore[method-assign]
    run_ours("full", cfg)
    return endings


def content(folder: Path) -> dict[str, bytes | None]:
    """All that is in a folder, by its path without what is random in names."""
    return {
        re.sub(r"\.[0-9a-z_]{8}(?=/|$)", ".*", str(path.relative_to(folder))): path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


def test_a_kill_leaves_what_a_copy_has(tmp_path: Path, stride: int, shard: int) -> None:
    cfg = tiny_config("full", tmp_path / "out", **SAVES)
    arguments = (cfg, tmp_path, stride, shard % stride)
    (endings,) = run_ranks(save_and_be_killed, 1, *arguments, join=False)
    copied, *killed, ended = endings
    assert copied == ended == 0 and set(killed) == {-signal.SIGKILL} and killed
    for number in range(1 + shard % stride, len(killed) * stride, stride):
        expected = content(tmp_path / "copies" / str(number))
        assert expected and content(tmp_path / f"killed_{number}") == expected, (
            f"operation {number}"
        )


def run_killed_at(kind: str, cfg: DictConfig, method: str, number: int) -> None:
    """A run that is killed in its second save, at an operation counted from where a method is called."""
    original = getattr(CheckpointFolder, method)
    saves = count(1)

    def call_and_be_killed(*arguments: Any) -> Any:
        if next(saves) == 2:
            kill_at(number)
        return original(*arguments)

    setattr(CheckpointFolder, method, call_and_be_killed)
    run_ours(kind, cfg)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("method", "number"), [("begin", 12), ("publish", 5)])
def test_a_run_that_is_killed_while_it_saves_in_the_background(
    method: str, number: int, tmp_path: Path
) -> None:
    whole, expected = undisturbed("full", 2, **ASYNCHRONOUS)
    killed = tmp_path / "killed"
    cfg = tiny_config("full", killed, **ASYNCHRONOUS)
    arguments = (2, "full", cfg, method, number)
    ended, _ = watch_ranks(run_killed_at, *arguments, until_exit_of=[0], join=False)
    assert ended.exit_code == -signal.SIGKILL, ended.said
    assert not (killed / "epoch_2").exists()
    assert_same_end(train("full", killed, 2, **ASYNCHRONOUS, **RESUME), expected)
    assert_same_weights(whole / "epoch_2", killed / "epoch_2")
    assert not (killed / ".saving").exists()


def run_and_die(cfg: DictConfig, delay: float) -> None:
    begin = CheckpointFolder.begin

    def begin_to_die(self: CheckpointFolder, name: str) -> Path:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        CheckpointFolder.begin = begin  # type: ignore[method-assign]
        return begin(self, name)

    CheckpointFolder.begin = begin_to_die  # type: ignore[method-assign]
    run_ours("full", cfg)


@pytest.mark.exhaustive
@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_is_killed_at_random_moments(seed: int, tmp_path: Path) -> None:
    """Within an operation as well. It saves after every step, and is resumed until it is done."""
    changes = {"save_every_n_steps": 1, "max_steps_per_epoch": 20, "epochs": 2}
    whole, expected = undisturbed("full", 1, **changes)
    killed = tmp_path / "killed"
    moment = random.Random(seed)
    for _ in range(3):
        delay = moment.uniform(0.0, 0.4)
        cfg = tiny_config("full", killed, **changes, **RESUME)
        watch_ranks(run_and_die, 1, cfg, delay, until_exit_of=[0], join=False)
        CheckpointFolder(killed).newest("full")  # completes what was sealed
        if (killed / "epoch_1").exists():
            break  # too late: it was done
    else:
        resumed = train("full", killed, **changes, **RESUME)
        assert_same_end(resumed, expected)
    assert_same_weights(whole / "epoch_1", killed / "epoch_1")
