"""Processes that trace beside a run: what they see of it, what comes back, and that they end with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from torchtune_adaptive.common.errors import ConfigError, NoPrediction
from torchtune_adaptive.planner import workers
from torchtune_adaptive.planner.workers import Worker

VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "CUDA_VISIBLE_DEVICES",
    "OWN",
)


def ask(make: Callable[..., Any], *arguments: Any, timeout: float = 300.0) -> Any:
    worker = Worker(make, *arguments)
    try:
        return worker.ask("question", timeout)
    finally:
        worker.close()


def adds(text: str) -> Callable[[str], str]:
    return lambda question: text + question


def looks_around() -> Callable[[str], Any]:
    print("is not an answer")
    variables = {name: os.environ.get(name) for name in VARIABLES}
    main = sys.modules["__main__"].__spec__
    return lambda _: (variables, main and main.name, sys.path)


def cannot_start() -> Callable[[str], str]:
    raise ConfigError("key", 1, "is wrong", "Write\n2")  # which could not be unpickled


def cannot_answer() -> Callable[[str], str]:
    def answer(_: str) -> str:
        raise NoPrediction("no")

    return answer


def ends() -> Callable[[str], str]:
    os._exit(3)


def never_answers() -> Callable[[str], None]:
    def answer(_: str) -> None:
        while True:
            pass

    return answer


def test_a_worker_answers() -> None:
    worker = Worker(adds, "an ")
    assert [worker.ask(text, 30.0) for text in ("a", "b")] == ["an a", "an b"]
    worker.close()
    with pytest.raises(NoPrediction, match="ended without an answer"):
        worker.ask("c", 30.0)


def test_it_is_no_rank_and_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")
    variables, main, path = ask(looks_around)
    assert variables == {**dict.fromkeys(VARIABLES), "CUDA_VISIBLE_DEVICES": "", "OWN": "1"}
    assert main == Worker.__module__, "the program that runs must not be imported again"
    assert set(filter(None, sys.path)) <= set(path)
    assert os.environ["RANK"] == "1"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (cannot_start, "could not be traced: ConfigError: key: 1 is wrong. Write 2."),
        (cannot_answer, "no"),
        (ends, "the planner process ended without an answer"),
    ],
)
def test_what_goes_wrong_comes_back(make: Callable[..., Any], reason: str) -> None:
    with pytest.raises(NoPrediction) as raised:
        ask(make)
    assert reason in str(raised.value)


def test_patience_has_an_end() -> None:
    with pytest.raises(NoPrediction, match=r"no answer within 0\.1 s"):
        ask(never_answers, timeout=0.1)


RUN = """
from tests.planner.test_workers import Worker, never_answers
worker = Worker(never_answers)
print(worker._process.pid, flush=True)
worker.ask("question", 60)
"""


def test_it_ends_with_the_run_that_is_killed() -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    worker = psutil.Process(int(run.stdout.readline()))
    time.sleep(0.5)
    assert worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
    run.kill()
    run.communicate()
    end = time.monotonic() + 300
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the worker has outlived the run"
        time.sleep(0.05)


def test_tracing_processes_keep_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr(workers.forkserver, "ensure_running", lambda: seen.update(os.environ))
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setenv("LOCAL_RANK", "1")
    before = dict(os.environ)
    workers.start_server("torchtune_adaptive.recipe.plan.preload")
    assert seen["XDG_CACHE_HOME"] == "/somewhere" and seen["CUDA_VISIBLE_DEVICES"] == ""
    assert "LOCAL_RANK" not in seen
    assert dict(os.environ) == before


INTERRUPTED = """
import multiprocessing, time
from torchtune_adaptive.planner.workers import processes

if __name__ == "__main__":
    try:
        with processes("json") as run:
            asked = [run(time.sleep, 3000) for _ in range(9)]
            while not multiprocessing.active_children():
                time.sleep(0.01)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        print(all(one.done() for one in asked))
"""


def test_an_interruption_ends_what_runs(tmp_path: Path) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["True"]


HIDING = ("queue", "types", "random", "signal", "selectors", "logging")
BESIDE = """
import os, signal
def looked_up(*_):
    import logging, queue, random, selectors, types
    return [one.__file__ for one in (logging, queue, random, selectors, types)]
def answers():
    return looked_up
def exits(status):
    os._exit(status)
def is_killed(number):
    os.kill(os.getpid(), number)
"""
ASKING = """
import os, queue, random, selectors, signal, sys, types  # before those in the working directory are found
from torchtune_adaptive.planner.workers import NoPrediction, Worker, call_alone, processes
sys.path.insert(0, os.getcwd())  # as ``python -m`` has it
import beside

def reason(ask):
    try:
        ask()
    except NoPrediction as error:
        print(error)

if __name__ == "__main__":
    before = sys.path[:]
    with processes("json") as run:
        found = [run(beside.looked_up).result()]
        reason(run(beside.is_killed, signal.SIGKILL).result)
        reason(run(beside.is_killed, signal.SIGSEGV).result)
        reason(run(beside.exits, 3).result)
    found.append(call_alone(beside.looked_up, timeout=60))
    reason(lambda: call_alone(beside.exits, 1, timeout=60))
    reason(lambda: call_alone(beside.is_killed, signal.SIGTERM, timeout=60))
    worker = Worker(beside.answers)
    found.append(worker.ask("question", 60))
    worker.close()
    assert sys.path == before
    print(all(path.startswith(os.path.dirname(os.__file__)) for paths in found for path in paths))
"""


def test_files_in_the_working_directory_hide_nothing_and_each_end_is_said(tmp_path: Path) -> None:
    program, here = tmp_path / "program.py", tmp_path / "here"
    here.mkdir()
    program.write_text(ASKING)
    (here / "beside.py").write_text(BESIDE)
    for name in HIDING:
        (here / f"{name}.py").write_text(f"raise SystemExit('the user\\'s {name}')\n")
    done = subprocess.run(
        [sys.executable, str(program)], cwd=here, capture_output=True, text=True, timeout=300
    )
    memory = ", perhaps because this machine has too little memory for it (each takes half a GiB)"
    script = 'Call plan_batch_size under if __name__ == "__main__": where the program is a script.'
    assert (done.stdout.splitlines(), done.returncode) == (
        [
            f"a process that traced was killed by SIGKILL{memory}.",
            "a process that traced was killed by SIGSEGV.",
            "a process that traced exited with status 3.",
            f"The process that traces exited with status 1. {script}",
            "The process that traces was killed by SIGTERM.",
            "True",
        ],
        0,
    ), done.stderr
