"""What torchrun reports when ranks fail: the reason, once, under its root cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from torchtune_adaptive.common import ending
from torchtune_adaptive.core.ranks.signs import Sign, lost_rank

pytestmark = pytest.mark.ranks

REASON = "ConfigError: headroom: 2 is not valid"
RANK = """
import os, sys, time
from torchtune_adaptive.common import ending
rank = int(os.environ["RANK"])
ending.MOMENT = 1.5
begun = os.path.join(os.path.dirname(__file__), "begun_%d") if len(sys.argv) > 1 else None
if begun:  # however long it takes to start the others
    open(begun % rank, "w").close()
    while not all(os.path.exists(begun % other) for other in range(3)):
        time.sleep(0.01)
def fail(on=(0, 1, 2), reason="ConfigError: headroom: 2 is not valid"):
    if rank in on:
        ending.explain(reason, known_to_all=True)
        sys.exit(1)
    time.sleep(600)  # until torchrun ends it
"""


def report_of(
    program: str,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    restarts: int = 0,
    says: int | None = None,
) -> str:
    """What torchrun says last when three ranks run a program; they themselves say nothing, but the reason
    where torchrun starts them again."""
    script = folder / "rank.py"
    script.write_text(RANK + program)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=3,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=folder.name,
        max_restarts=restarts,
    )
    started = time.monotonic()
    with pytest.raises(ChildFailedError) as failed:
        elastic_launch(launch, sys.executable)("-u", str(script), "together")
    assert time.monotonic() - started < 300
    said = capfd.readouterr()
    assert (said.out + said.err).count("ConfigError") == (restarts if says is None else says)
    return str(failed.value)


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(Path(ending.__file__).parents[2]))
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in handlers.items():  # torchrun leaves its own
        if handler is not signal.getsignal(number):
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("program", "rank"),
    [
        pytest.param("fail(on=[1])", 1, id="on one rank"),
        pytest.param("fail()", None, id="on all ranks"),
        pytest.param("time.sleep(2 * (rank == 0)); fail()", None, id="rank 0 is slow"),
        pytest.param(
            "time.sleep(rank == 2); fail([0, 2], f'ConfigError: of rank {rank}')",
            0,
            id="one leads to another",
        ),
    ],
)
def test_the_reason_is_the_root_cause_and_stands_there_once(
    program: str, rank: int | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = report_of(program, tmp_path, capfd)
    assert report.count("ConfigError") == 1
    _, _, cause = report.partition("Root Cause")
    assert f"traceback : {'ConfigError: of rank 0' if 'of rank' in program else REASON}" in cause
    assert rank is None or f"rank      : {rank} " in cause
    assert "Traceback" not in report


def test_the_reason_for_a_restart_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """torchrun reports the last attempt only."""
    assert report_of("fail(on=[1])", tmp_path, capfd, restarts=1).count("ConfigError") == 1


def test_what_every_attempt_would_end_for_is_said_once_and_ends_the_others_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = """
ending.end_if_in_vain()
with open(__file__ + ".begun", "a") as file:
    file.write("x")
ending.explain("ConfigError: it stays", known_to_all=True, repeats=True)
sys.exit(1)
"""
    report = report_of(program, tmp_path, capfd, restarts=3, says=1)
    assert report.count("ConfigError: it stays") == 1
    begun = (tmp_path / "rank.py.begun").read_text()
    assert 1 <= len(begun) <= 3, "only ranks of the first attempt"


def test_a_bug_keeps_its_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = """
try:
    1 / (rank != 1)
except ZeroDivisionError as error:
    ending.explain_bug(error)
    sys.exit(1)
time.sleep(600)
"""
    cause = report_of(program, tmp_path, capfd).partition("Root Cause")[2]
    assert "Traceback (most recent call last)" in cause
    assert "ZeroDivisionError: division by zero" in cause


@pytest.mark.parametrize("file", ["", "a folder that is not there/0/error.json"])
def test_without_torchrun_or_its_folder_the_reason_is_printed(file: str, tmp_path: Path) -> None:
    environment = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / file)} if file else {}
    done = subprocess.run(
        [sys.executable, "-c", f"{RANK}\nfail()"],
        env={**os.environ, **environment, "TORCHELASTIC_RUN_ID": "1", "RANK": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == f"rank 0: {REASON}"


def test_rank_0_speaks_for_all_unless_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ending, "MOMENT", 0.3)
    for name in ("TORCHELASTIC_ERROR_FILE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    slept: list[None] = []
    sleep = time.sleep
    monkeypatch.setattr(ending.time, "sleep", lambda seconds: slept.append(sleep(seconds)))
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        ending.explain(REASON, known_to_all=True)
        assert bool(slept) is (rank == "1")
        assert capsys.readouterr().err == f"\nrank {rank}: {REASON}\n\n"


def sign(activity: str, silent: float = 0.0, still: float = 0.0, stopped: str = "") -> Sign:
    return Sign(activity, progress=1, patience=5.0, stopped=stopped, heard=-silent, moved=-still)


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (sign("step 4", silent=60), True),
        (sign("step 4", still=60), True),
        (sign("step 4", stopped="RuntimeError: CUDA error"), True),
        (sign("step 4"), False),
    ],
    ids=["silent", "hanging", "stopped", "alive"],
)
def test_the_rank_that_a_watchdog_names_is_found_in_what_it_says(other: Sign, names: bool) -> None:
    own = Sign("step 4", progress=2, patience=5.0)
    verdict = lost_rank(own, {12: other}, 0.0, limit=30.0)
    assert (verdict is not None) is names
    if names:
        assert ending.named_rank(f"rank 0: {verdict}. Stopping: this rank would wait") == 12


@pytest.mark.parametrize(
    ("reason", "rank"),
    [
        ("rank 1: rank 0, which hosts the signs of life, does not answer (timeout). Stopping", 0),
        ("rank 3: RankLost: lost rank 12 (silent; its last sign came from 'step 4') while", 12),
        ("rank 3: RankLost: another rank ended while this rank was in 'step 4'.", None),
        ("rank 3: RankLost: lost ranks 1, 2, which did not begin this attempt in time.", None),
        ("rank 3: CheckpointError: rank 2 has another one of this name", None),
        ("rank 3: ConfigError: headroom: 2 is not valid", None),
    ],
)
def test_the_rank_that_a_reason_names(reason: str, rank: int | None) -> None:
    assert ending.named_rank(reason) == rank


LEAVING = """
import atexit, logging, logging.handlers, sys, time
from torchtune_adaptive.common import ending
class Group:
    def __del__(self):  # as NCCL does at the end of a process
        print("waits for all ranks", flush=True)
        time.sleep(600)
group = Group()
atexit.register(lambda: print("the last metrics"))
logging.getLogger().addHandler(
    logging.handlers.MemoryHandler(9, target=logging.StreamHandler(sys.stderr)))
logging.warning("the last message")
print("buffered")
try:
    ending.leave(3)
finally:
    print("the report is written")
"""


def test_who_leaves_the_others_says_everything_and_waits_for_nobody() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 3
    assert done.stdout.split("\n") == ["buffered", "the report is written", "the last metrics", ""]
    assert done.stderr == "the last message\n"
