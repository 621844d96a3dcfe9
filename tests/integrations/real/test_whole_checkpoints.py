"""Whole checkpoints: of several processes, and wherever ``ckpt-chaos`` kills a run while it saves."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import Trainer, TrainerCallback

from tests.helpers import chaos
from tests.helpers.tiny_trainer import Net, Rows, arguments, losses
from tests.integrations.real.trainers import AS_CONFIGURED, SEARCHING, make, on_ranks, rank
from tests.integrations.real.ways import settings_of
from torchtune_adaptive.common import CheckpointError
from torchtune_adaptive.integrations.transformers import adaptive

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
MANIFEST = ".checkpoint.json"
SAVES = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}


class Steps(TrainerCallback):  # type: ignore[misc]
    """Notes the steps that are taken, and tells one process to end in one of them."""

    def __init__(self, told: tuple[int, int] | None = None) -> None:
        self.steps: list[int] = []
        self.told = told

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.told == (rank(), state.global_step + 1):
            os.kill(os.getpid(), signal.SIGTERM)
            for timer in threading.enumerate():
                if isinstance(timer, threading.Timer):
                    timer.join()


def run(kind: str, way: str, folder: str, resume: Any = None, **more: Any) -> dict[str, Any]:
    options = SEARCHING if more.pop("searching", False) else AS_CONFIGURED
    settings = settings_of(kind, way) | SAVES
    settings.pop("eval_strategy", None)
    if way == "fsdp2":
        sharded = {"state_dict_type": "SHARDED_STATE_DICT"}
        settings["fsdp_config"] = {**settings["fsdp_config"], **sharded}
    seen = Steps(more.pop("told", None))
    with mock.patch(
        "transformers.trainer_jit_checkpoint.CheckpointManager.__init__.__defaults__", (0,)
    ):
        trainer = make(kind, options, folder, **settings | more | {"callbacks": [seen]})
    try:
        trainer.train(resume_from_checkpoint=resume)
    except CheckpointError as error:
        return {"error": str(error)}
    return {"steps": seen.steps, "losses": losses(trainer)}


@pytest.mark.parametrize(
    ("kind", "way"), [("trainer", "ddp"), ("sft", "ddp"), ("trainer", "fsdp2")]
)
def test_processes_agree_on_the_newest_that_is_whole(kind: str, way: str, tmp_path: Path) -> None:
    whole = on_ranks(run, 2, kind, way, str(tmp_path))
    assert [each["steps"] for each in whole] == [[1, 2, 3]] * 2
    written = sorted((tmp_path / "checkpoint-3").rglob("*"))
    [of_second] = [path for path in written if path.name in ("rng_state_1.pth", "__1_0.distcp")][
        -1:
    ]
    os.truncate(of_second, 10)
    again = on_ranks(run, 2, kind, way, str(tmp_path), True)
    assert [each["steps"] for each in again] == [[3]] * 2
    assert [each["losses"] for each in again] == [each["losses"] for each in whole]
    os.truncate(of_second, 10)
    refused = on_ranks(run, 2, kind, way, str(tmp_path), str(tmp_path / "checkpoint-3"))
    assert all(f"{of_second.name} is truncated" in each["error"] for each in refused)


def on_node(folder: str, resume: Any = None) -> dict[str, Any]:
    """A process that is a node of its own, with a disk of its own. Of its models, transformers (5.23) saves
    weights on the first node only."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    seen, own = Steps(), Path(folder, os.environ["RANK"])
    args = arguments(own, save_on_each_node=True, **SAVES)
    trainer = adaptive(Trainer, AS_CONFIGURED)(Net(), args, train_dataset=Rows(), callbacks=[seen])
    trainer.train(resume_from_checkpoint=resume)
    return {"steps": seen.steps, "losses": losses(trainer)}


def test_each_node_has_its_own(tmp_path: Path) -> None:
    whole = on_ranks(on_node, 2, str(tmp_path))
    assert all((tmp_path / f"{node}/checkpoint-3/{MANIFEST}").stat().st_size for node in range(2))
    os.truncate(tmp_path / "1/checkpoint-3/model.safetensors", 10)
    again = on_ranks(on_node, 2, str(tmp_path), True)
    assert [each["steps"] for each in again] == [[3]] * 2
    assert [each["losses"] for each in again] == [each["losses"] for each in whole]


def _with(more: dict[str, Any], *arguments: Any) -> dict[str, Any]:
    return run(*arguments, **more)


@pytest.mark.parametrize("kind", ["trainer", "sft", "dpo"])
@pytest.mark.parametrize("step", [1, 2])
def test_one_process_that_is_told_ends_both(kind: str, step: int, tmp_path: Path) -> None:
    """In the first step, which begins with a search, and in another."""
    settings: dict[str, Any] = {"save_steps": 10, "searching": True}
    whole = on_ranks(_with, 2, settings, kind, "ddp", str(tmp_path / "whole"))
    told = settings | {"told": (1, step), "enable_jit_checkpoint": True}
    ended = on_ranks(_with, 2, told, kind, "ddp", str(tmp_path))
    assert [each["steps"] for each in ended] == [[*range(1, step + 1)]] * 2
    again = on_ranks(_with, 2, settings, kind, "ddp", str(tmp_path), True)
    assert [each["steps"] for each in again] == [[*range(step + 1, 4)]] * 2
    assert [each["losses"] for each in again] == [each["losses"] for each in whole]


KILLED = {
    "trainer": ("trainer", {"max_points": 16}),
    "trainer, told to end": ("trainer", {"max_points": 6, "modes": "term", "grace": 20}),
    "trainer on two ranks": ("trainer", {"max_points": 8, "ranks": 2}),
    "trainer, the second of two ranks": ("trainer", {"max_points": 3, "ranks": 2, "crash_rank": 1}),
    "SFT": ("sft", {"max_points": 8}),
    "DPO": ("dpo", {"max_points": 6}),
}


@pytest.mark.parametrize("case", KILLED)
def test_wherever_it_is_killed_a_trainer_goes_on(case: str, tmp_path: Path) -> None:
    kind, options = KILLED[case]
    flags = ["on signal"] if "told" in case else []
    with chaos.served(tmp_path, *chaos.OF_TRAINERS) as jobs:
        verdicts = chaos.trainer(jobs, tmp_path / "work", kind, "adaptive", *flags, **options)
    assert len(verdicts) == int(str(options["max_points"])) + 1
    passed = [name for name, verdict in verdicts.items() if verdict == "PASS"]
    # A run that is told to end in its last save has ended.
    unreached = {"NOT_REACHED"} if flags else set[str]()
    assert {*verdicts.values()} <= {"PASS", *unreached}, verdicts
    assert len(passed) > len(verdicts) / 2, verdicts


def test_the_plain_trainer_does_not(tmp_path: Path) -> None:
    """What is compared is seen: the plain trainer reads what a kill has left."""
    with chaos.served(tmp_path, *chaos.OF_TRAINERS) as jobs:
        verdicts = chaos.trainer(jobs, tmp_path / "work", "trainer", "plain", max_points=6)
    assert "HARD_FAIL" in verdicts.values()
