"""What a rank does when its launcher ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.killing import in_child
from torchtune_adaptive.common import launcher

PARENT = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]]).pid, flush=True)
time.sleep(600)
"""
RANK = """
import pathlib, signal, sys, time
from torchtune_adaptive.common import launcher
signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path("asked").touch()))
launcher.stop_when_it_ends()
pathlib.Path("begun").touch()
time.sleep(600)
"""


def wait_for(path: Path, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return path.exists()


@pytest.mark.parametrize("launched", [True, False])
def test_a_rank_is_asked_to_stop_when_its_launcher_is_killed(
    launched: bool, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(launcher.__file__).parents[2])}
    environment.pop("TORCHELASTIC_RUN_ID", None)
    if launched:
        environment["TORCHELASTIC_RUN_ID"] = "1"
    command = [sys.executable, "-c", PARENT, RANK]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        rank = int(parent.stdout.readline())
        try:
            assert wait_for(tmp_path / "begun", 60)
            parent.kill()
            assert wait_for(tmp_path / "asked", 30 if launched else 0.3) is launched
        finally:
            if not launched:
                os.kill(rank, signal.SIGKILL)


@pytest.mark.parametrize(
    ("first", "ended"),
    [("/usr/bin/python3.11", False), ("/usr/sbin/init", True), ("/proc/1/exe", True)],
)
def test_a_rank_whose_launcher_has_ended_already_ends(
    first: str, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "realpath", {"/proc/1/exe": first}.__getitem__)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(os, "getppid", lambda: 1)
    status = in_child(launcher.stop_when_it_ends)
    assert status == (-signal.SIGTERM if ended else 0)
