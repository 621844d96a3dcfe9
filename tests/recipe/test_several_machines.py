"""Runs on several machines, each with a launcher of its own; here both launchers are on one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.killing import deadly
from tests.helpers.runs import BIN, assert_same_weights, free_port, logged, start

TUNE = BIN / "tune"
pytestmark = [pytest.mark.runs, pytest.mark.exhaustive]


@contextmanager
def two_machines(
    folder: Path, *overrides: str, options: Sequence[str] = (), **environment: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Two launchers with one rank each, as docs/clusters.md starts them; killed with all they started."""
    launcher = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d", *options]
    launcher += ["--rdzv_endpoint", f"localhost:{free_port()}", "--rdzv_id", "test"]
    recipe = ["adaptive_full_finetune_distributed", "--config", "tiny/full"]
    running = []
    for number in range(2):  # the first one holds torchrun's own key-value store
        one = [*launcher, "--rdzv_conf", f"is_host={number == 0},last_call_timeout=5", *recipe]
        command = [TUNE, "run", *one, "output_dir=out", *overrides]
        log = folder / f"machine_{number}.txt"
        running.append(start(command, folder, log, **environment))
    try:
        yield running
    finally:
        for machine in running:
            stop_machine(machine)


def stop_machine(machine: subprocess.Popen[str]) -> None:
    """Kill a launcher and its ranks, which torchrun starts in sessions of their own."""
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(machine.pid)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    for pid in [machine.pid, *map(int, children.stdout.split())]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    machine.wait(timeout=300)


def said(folder: Path) -> str:
    return "\n".join((folder / f"machine_{number}.txt").read_text() for number in range(2))


def test_two_machines_agree_on_a_size_and_train(tmp_path: Path) -> None:
    quick = ["max_steps_per_epoch=3", "epochs=1", "adaptive_batching.cache=False"]
    with two_machines(tmp_path, *quick) as machines:
        for machine in machines:
            assert machine.wait(timeout=300) == 0, said(tmp_path)
    assert "micro-batch 8 x accumulation 1 x 2 ranks" in said(tmp_path)
    out = tmp_path / "out"
    found = json.loads((out / "batch_size_search.json").read_text())
    assert found["batch_size"] == 8
    assert (out / "epoch_0" / ".checkpoint.json").exists()


def test_a_machine_that_is_gone_ends_the_run_on_the_other(tmp_path: Path) -> None:
    """As when a node fails: the other machine does not wait for ever, and says which rank is gone."""
    slow = ["epochs=100", "adaptive_batching.cache=False", "adaptive_batching.rank_timeout=10"]
    with two_machines(tmp_path, *slow) as machines:
        end = time.monotonic() + 300
        while not re.search(r"Loss: \d|step +\d|\d+/\d+ ", said(tmp_path)):
            assert time.monotonic() < end, said(tmp_path)
            time.sleep(0.2)
        left, gone = machines
        stop_machine(gone)
        assert left.wait(timeout=300) != 0, "it ends, instead of waiting for the process group"
    assert re.search(r"RankLost: lost rank [01]", said(tmp_path)), said(tmp_path)


QUICK = ["max_steps_per_epoch=8", "epochs=1", "save_every_n_steps=3", "resume_from_checkpoint=True"]
KILLED = [
    "dataset._component_=tests.helpers.killing.deadly_rows",
    "dataset.rows=torchtune.datasets.instruct_dataset",
]
RESTARTS = ["--max-restarts", "2"]


def test_a_rank_that_is_killed_is_restarted_on_both_machines(tmp_path: Path) -> None:
    environment = deadly([(1, "step 5", signal.SIGKILL)])
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    for name, more in (("whole", {"FATAL": "[]"}), ("killed", {})):
        folder = tmp_path / name
        folder.mkdir()
        with two_machines(
            folder, *QUICK, *KILLED, options=RESTARTS, **{**environment, **store, **more}
        ) as machines:
            for machine in machines:
                assert machine.wait(timeout=300) == 0, said(folder)
        assert ("Restart 1 of 2." in said(folder)) == (name == "killed")
    assert logged(tmp_path / "killed") == logged(tmp_path / "whole")
    weights = [tmp_path / name / "out" / "epoch_0" for name in ("whole", "killed")]
    assert_same_weights(*weights)


def test_without_a_store_for_each_attempt_a_restart_is_refused(tmp_path: Path) -> None:
    environment = deadly([(1, "step 5", signal.SIGKILL)])
    with two_machines(tmp_path, *QUICK, *KILLED, options=RESTARTS, **environment) as machines:
        for machine in machines:
            assert machine.wait(timeout=300) != 0
    assert "--max-restarts 2: on several machines a restart ends with an error" in said(tmp_path)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE: None leaves a restart on several" in said(tmp_path)
