"""Runs on several machines, each with a launcher of its own; here both launchers are on one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.killing import deadly
from tests.helpers.runs import BIN, assert_same_weights, free_port, logged, start

pytestmark = [pytest.mark.runs, pytest.mark.exhaustive]


class Machines(list[subprocess.Popen[str]]):
    """Launchers with one rank each, as docs/clusters.md starts them."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        environment: dict[str, str],
        hosts: bool,
        program: str = "tune",
    ) -> None:
        self.folder, self.command, self.environment = folder, command, environment
        self.hosts, self.program = hosts, program

    def place(self, number: int) -> Path:
        """The folder in which one is started."""
        return self.folder / f"of_machine_{number}"

    def begin(self) -> None:
        """Start one more."""
        number = len(self)
        self.place(number).mkdir()
        conf = ["--rdzv_conf", f"is_host={self.hosts and number == 0},last_call_timeout=5"]
        if "c10d" not in self.command:
            conf = ["--node_rank", str(number)]
        command = [BIN / self.program, "run", *conf, *self.command]
        log = self.folder / f"machine_{number}.txt"
        self.append(start(command, self.place(number), log, **self.environment))


@contextmanager
def two_machines(
    folder: Path,
    *overrides: str,
    options: Sequence[str] = (),
    store_at: int | None = None,
    rendezvous: Sequence[str] = (),
    program: str = "tune",
    **environment: str,
) -> Iterator[Machines]:
    """Two machines with a run; killed with all they started. By default the first holds torchrun's store."""
    at = f"localhost:{store_at or free_port()}"
    rendezvous = rendezvous or ["--rdzv_backend", "c10d", "--rdzv_endpoint", at]
    launcher = ["--nnodes", "2", "--nproc_per_node", "1", *options, *rendezvous]
    launcher += ["--rdzv_id", "test"]
    recipe = [
        "adaptive_full_finetune_distributed",
        "--config",
        "tiny/full",
        f"output_dir={folder}/out",
    ]
    running = Machines(
        folder, [*launcher, *recipe, *overrides], environment, store_at is None, program
    )
    try:
        for _ in range(2):
            running.begin()
        yield running
    finally:
        for machine in running:
            stop_machine(machine)


def stop_machine(machine: subprocess.Popen[str]) -> None:
    """Kill a launcher and its ranks, which torchrun starts in sessions of their own."""
    for pid in [machine.pid, *ranks_of(machine)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    machine.wait(timeout=300)


def ranks_of(machine: subprocess.Popen[str]) -> list[int]:
    """The processes that a launcher has started."""
    command = ["ps", "-o", "pid=", "--ppid", str(machine.pid)]
    children = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return [*map(int, children.stdout.split())]


def said(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("machine_*.txt")))


def wait_until(is_so: Callable[[str], object], folder: Path) -> None:
    """Wait until what the machines have said is as it should be."""
    end = time.monotonic() + 300
    while not is_so(said(folder)):
        assert time.monotonic() < end, said(folder)
        time.sleep(0.2)


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
        wait_until(partial(re.search, r"Loss: \d|step +\d|\d+/\d+ "), tmp_path)
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


@pytest.mark.parametrize("shared", ["0", "1"], ids=["a store for all", "a store for each"])
def test_a_rank_that_is_killed_is_restarted_on_both_machines(shared: str, tmp_path: Path) -> None:
    environment = deadly([(1, "step 5", signal.SIGKILL)])
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": shared}
    for name, more in (("whole", {"FATAL": "[]"}), ("killed", {})):
        folder = tmp_path / name
        folder.mkdir()
        with two_machines(
            folder, *QUICK, *KILLED, options=RESTARTS, **{**environment, **store, **more}
        ) as machines:
            for machine in machines:
                assert machine.wait(timeout=300) == 0, said(folder)
        assert ("Restart 1 of 2." in said(folder)) == (name == "killed")
        assert ("may stop the run" in said(folder)) == (shared == "0")
    assert logged(tmp_path / "killed") == logged(tmp_path / "whole")
    weights = [tmp_path / name / "out" / "epoch_0" for name in ("whole", "killed")]
    assert_same_weights(*weights)


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("tune", ["--rdzv_backend", "static", "--rdzv_endpoint", "localhost:{port}"]),
        ("tune-adaptive", ["--master_addr", "localhost", "--master_port", "{port}"]),
    ],
)
def test_static_rendezvous_restarts_a_rank_that_is_killed(
    program: str, options: Sequence[str], tmp_path: Path
) -> None:
    port = free_port()
    killed = deadly([(1, "step 5", signal.SIGKILL)])
    meet = [option.format(port=port) for option in options]
    with two_machines(
        tmp_path, *QUICK, *KILLED, options=RESTARTS, rendezvous=meet, program=program, **killed
    ) as machines:
        for machine in machines:
            assert machine.wait(timeout=300) == 0, said(tmp_path)
    assert "Restart 1 of 2." in said(tmp_path)
    assert logged(tmp_path).keys() == {*range(1, 9)}, "the same in each attempt"


LONG = ["max_steps_per_epoch=60", "epochs=1", "save_every_n_steps=3", "resume_from_checkpoint=True"]
LONG += ["batch_size=2", "use_maximum_batch_size=False", "adaptive_batching.rank_timeout=10"]
"""Steps that are not done before something happens."""


def test_a_rank_that_is_stopped_is_restarted(tmp_path: Path) -> None:
    """Its launcher hears of it from the others, and kills it; so it is with c10d rendezvous alone."""
    options = [*RESTARTS, "--shutdown-timeout", "5"]
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with two_machines(tmp_path, *LONG, options=options, **store) as machines:
        wait_until(partial(re.search, r"Saved the checkpoint \S+/epoch_0_step_3\b"), tmp_path)
        [rank] = ranks_of(machines[1])
        os.kill(rank, signal.SIGSTOP)
        for machine in machines:
            assert machine.wait(timeout=300) == 0, said(tmp_path)
    assert re.search(r"rank [01] has sent no sign of life for 10 s", said(tmp_path))
    assert "Restart 1 of 2." in said(tmp_path)
    assert logged(tmp_path).keys() == {*range(1, 61)}, "the same in each attempt"


def test_a_launcher_that_is_stopped_is_a_machine_that_is_lost(tmp_path: Path) -> None:
    """Its ranks train on; without them, the others go on alone."""
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    options = ["--nnodes", "1:2", *RESTARTS]
    elsewhere = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with two_machines(
        tmp_path, *LONG, options=options, store_at=elsewhere.port, **store
    ) as machines:
        wait_until(partial(re.search, r"Saved the checkpoint \S+/epoch_0_step_3\b"), tmp_path)
        machines[1].send_signal(signal.SIGSTOP)
        wait_until(partial(re.search, r"Saved the checkpoint \S+/epoch_0_step_9\b"), tmp_path)
        [rank] = ranks_of(machines[1])
        os.kill(rank, signal.SIGKILL)
        assert machines[0].wait(timeout=300) == 0, said(tmp_path)
    assert re.search(r"Attempt 2 on 1 rank \(2 before\), from step \d+", said(tmp_path))


@pytest.mark.parametrize("lost", [1, 0])
def test_a_machine_that_is_gone_and_comes_back(lost: int, tmp_path: Path) -> None:
    """The run goes on without it from the last checkpoint, and with it from where it is, which it saves. The
    store of the launchers is on neither machine."""
    long = ["epochs=1", "max_steps_per_epoch=400", "save_every_n_steps=5", "batch_size=2"]
    long += ["resume_from_checkpoint=True", "use_maximum_batch_size=False"]
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    options = ["--nnodes", "1:2", "--max-restarts", "3"]
    elsewhere = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with two_machines(
        tmp_path, *long, options=options, store_at=elsewhere.port, **store
    ) as machines:
        wait_until(partial(re.search, r"Saved the checkpoint \S+/out/epoch_0_step_5\b"), tmp_path)
        stop_machine(machines[lost])
        wait_until(partial(re.search, r"Attempt 2 on 1 rank \(2 before\), from step "), tmp_path)
        saved = said(tmp_path).count("Saved the checkpoint")
        wait_until(lambda text: text.count("Saved the checkpoint") > saved, tmp_path)
        machines.begin()
        wait_until(partial(re.search, r"Attempt 3 on 2 ranks \(1 before\), from step "), tmp_path)
    events = (tmp_path / "out" / "batch_size_events.jsonl").read_text().splitlines()
    attempts = [event for event in map(json.loads, events) if "attempt" in event]
    assert [each["ranks"] for each in attempts[:2]] == [[2, 1], [1, 2]]
    assert "steps_again" not in attempts[1], "it saved before it went on with both"


@pytest.mark.parametrize("lost", [1, 0])
def test_a_machine_that_is_lost_with_all_it_has_takes_no_snapshot_with_it(
    lost: int, tmp_path: Path
) -> None:
    """Each has a folder of its own for snapshots, and a copy of the other's; there is no checkpoint."""
    steps, every = 100, 4
    quick = [
        f"max_steps_per_epoch={steps}",
        "epochs=1",
        "batch_size=2",
        "resume_from_checkpoint=True",
    ]
    quick += ["use_maximum_batch_size=False", f"adaptive_batching.snapshot_every_n_steps={every}"]
    quick += ["adaptive_batching.snapshot_folder=memory"]
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    options = ["--nnodes", "1:2", "--max-restarts", "3"]
    for name in ("whole", "disturbed"):
        folder = tmp_path / name
        folder.mkdir()
        elsewhere = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with two_machines(
            folder, *quick, options=options, store_at=elsewhere.port, **store
        ) as machines:
            left = [*machines]
            if name == "disturbed":
                wait_until(partial(re.search, r"Saved the snapshot \S+/epoch_0_step_8\b"), folder)
                stop_machine(left.pop(lost))
                shutil.rmtree(machines.place(lost))
            for machine in left:
                assert machine.wait(timeout=300) == 0, said(folder)
    [(at, step)] = re.findall(r"Resuming from (\S+) \(step (\d+)\)", said(folder))
    assert f"of_machine_{1 - lost}/memory/" in at and int(step) >= 8
    assert "Attempt 2 on 1 rank (2 before)" in said(folder)
    whole, disturbed = (logged(tmp_path / name, 1e-5) for name in ("whole", "disturbed"))
    assert whole.keys() == disturbed.keys() == {*range(1, steps + 1)}
    assert all(disturbed[step] == pytest.approx(loss, rel=1e-5) for step, loss in whole.items())
