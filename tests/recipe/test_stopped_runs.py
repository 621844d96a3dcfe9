"""Runs that are asked to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from omegaconf import DictConfig

from tests.helpers import recipes
from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import (
    BIN,
    RESUME,
    Records,
    assert_same_records,
    assert_same_weights,
    start,
    train,
    undisturbed,
)
from torchtune_adaptive.common.errors import Stopped
from torchtune_adaptive.core.step.exchange import StepOutcome
from torchtune_adaptive.core.step.train_step import TrainStep

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

CHANGES = {"max_steps_per_epoch": 3, "epochs": 2}


def run_signalled(
    kind: str, cfg: DictConfig, number: int, step: int, on_rank: int
) -> tuple[Records, int, str]:
    """A run of which one rank gets a signal before one of its steps ends; how it ended."""
    apply = TrainStep.apply
    steps = iter(range(1, 1000))

    def apply_and_signal(self: TrainStep, **how: bool) -> StepOutcome:
        if next(steps) == step and dist.get_rank() == on_rank:
            os.kill(os.getpid(), number)
        return apply(self, **how)

    TrainStep.apply = apply_and_signal  # type: ignore[method-assign]
    try:
        run_ours(kind, cfg)
    except Stopped as stopped:
        return list(recipes.RECORDS), stopped.status, str(stopped)
    return list(recipes.RECORDS), 0, ""


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("kind", "number", "step", "changes"),
    [
        ("full", signal.SIGINT, 3, {}),
        # Where the optimizer steps in backward, the ranks have spoken before it: the next step is the last.
        ("full", signal.SIGTERM, 1, {"optimizer_in_bwd": True}),
        ("lora", signal.SIGTERM, 5, {"model.lora_dropout": 0.1}),
        ("full", signal.SIGTERM, 5, {"enable_async_checkpointing": True}),
        ("lora", signal.SIGTERM, 5, {"adaptive_batching.sharded_checkpoints": "background"}),
    ],
    ids=["an epoch's last step", "optimizer in backward", "lora", "asynchronous", "in background"],
)
def test_a_signal_to_one_rank_saves_on_all_and_the_run_resumes_exactly(
    kind: str, number: int, step: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    changes = {**CHANGES, **changes}
    whole, expected = undisturbed(kind, 2, **changes)
    out = tmp_path / "stopped"
    cfg = tiny_config(kind, out, **changes)
    (first, status, said), (_, other, _) = run_ranks(
        run_signalled, 2, kind, cfg, number, step, 1, join=False
    )
    assert other == 128 + number and status in (143, other)
    step += "optimizer_in_bwd" in changes
    assert f"saved {out}/epoch_{(step - 1) // 3}_step_{step}. Resume with" in said
    resumed = train(kind, out, 2, **changes, **RESUME)
    assert len(first) == step
    assert_same_records(first + resumed, expected)
    assert_same_weights(whole / "epoch_1", out / "epoch_1")


def test_a_signal_in_the_search_ends_all_ranks(tmp_path: Path) -> None:
    search = {"use_maximum_batch_size": True, "adaptive_batching.memory_limit": "40MiB"}
    cfg = tiny_config("full", tmp_path, **CHANGES, **search)
    ended = watch_ranks(
        run_to_its_end,
        *(2, "full", cfg, signal.SIGTERM, 3, 1),
        until_exit_of=[0, 1],
        join=False,
    )
    assert "stopped by SIGTERM while not training, so there is nothing to save" in ended[1].said
    assert "sent no sign of life" not in ended[0].said, "nobody waited"
    assert "rank 1" in ended[0].said and ended[0].exit_code not in (0, None)
    assert not list(tmp_path.glob("epoch_*"))


def run_to_its_end(*arguments: Any) -> None:
    _, status, said = run_signalled(*arguments)
    print(said)
    sys.exit(status)


def signalled(
    *command: str,
    cwd: Path,
    when: str,
    send: Callable[[subprocess.Popen[str]], None],
    timeout: float = 300,
) -> tuple[int, str]:
    """A command that is sent a signal once it has said something; its status, and all that it said."""
    log = cwd / "said"
    process = start([BIN / command[0], *command[1:]], cwd, log)
    try:
        end = time.monotonic() + timeout
        while when not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.02)
        send(process)
        status = process.wait(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, log.read_text()


SINGLE = ("tune", "run", "adaptive_full_finetune_distributed", "--config", "tiny/full")
FIXED = ("use_maximum_batch_size=False", "output_dir=out", "adaptive_batching.cache=False")


@pytest.mark.exhaustive
def test_ctrl_c_in_a_single_process_with_workers(tmp_path: Path) -> None:
    """It reaches the whole group, as from a terminal: the processes that fetch rows as well."""
    status, said = signalled(
        *(*SINGLE, *FIXED, "adaptive_batching.num_workers=1"),
        cwd=tmp_path,
        when="step 1, loss",
        send=lambda process: os.killpg(process.pid, signal.SIGINT),
    )
    assert status == 130, said
    assert "Ctrl-C: saving a checkpoint after this step" in said
    assert "Resume with resume_from_checkpoint=True" in said and "Traceback" not in said
    assert list((tmp_path / "out").glob("epoch_0_step_*"))


BAD = """import torchtune.datasets as theirs

class Rows:
    def __init__(self, *given, **named):
        self.rows = theirs.instruct_dataset(*given, **named)
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, number):
        if number == 5:
            raise KeyError("the bad row")
        return self.rows[number]
"""


@pytest.mark.parametrize("bad", [False, True], ids=["in an epoch", "with an error in a worker"])
def test_a_run_with_workers_ends(bad: bool, tmp_path: Path) -> None:
    """At exit Python sends workers a SIGTERM, which they ignore, and then waits for them."""
    (tmp_path / "bad.py").write_text(BAD)
    changes = ["adaptive_batching.num_workers=1", "epochs=1", "max_steps_per_epoch=4"]
    if bad:
        changes += ["dataset._component_=bad.Rows", "shuffle=False"]
    ended = subprocess.run(
        [BIN / SINGLE[0], *SINGLE[1:], *FIXED, *changes],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == bad, ended.stdout
    assert ("the bad row" if bad else "Trained 4 steps") in ended.stdout
    assert "killed by signal" not in ended.stdout


@pytest.mark.exhaustive
def test_ctrl_c_while_it_searches(tmp_path: Path) -> None:
    status, said = signalled(
        *(*SINGLE, "output_dir=out"),
        cwd=tmp_path,
        when="Searching for the largest micro-batch",
        send=lambda process: process.send_signal(signal.SIGINT),
    )
    assert status == 130 and "stopped by Ctrl-C while not training" in said
    assert "Traceback" not in said and not list((tmp_path / "out").glob("epoch_*"))


@pytest.mark.exhaustive
def test_preemption_under_torchrun(tmp_path: Path) -> None:
    """torchrun passes SIGTERM on, waits for 30 seconds, and kills."""
    status, said = signalled(
        *("tune", "run", "--nproc_per_node", "2", *SINGLE[2:], *FIXED),
        cwd=tmp_path,
        when="step 1, loss",
        send=lambda process: process.terminate(),
    )
    assert status != 0
    assert "Resume with resume_from_checkpoint=True" in said
    assert len(list((tmp_path / "out").glob("epoch_0_step_*"))) == 1
