"""A fork that traces beside its starter: what it finds and what it raises come back, and it ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from operator import methodcaller
from typing import NoReturn

import psutil
import pytest

from torchtune_adaptive.common.errors import ConfigError, NoPrediction
from torchtune_adaptive.planner.repetition import NotPeriodic
from torchtune_adaptive.planner.trace import beside as beside_module
from torchtune_adaptive.planner.trace.beside import Beside


class Made:
    def __init__(self) -> None:
        self.process = os.getpid()
        self.number = 0

    def next(self) -> tuple[int, int]:
        self.number += 1
        return self.process, self.number

    def fails(self, error: Exception) -> NoReturn:
        raise ConfigError("key", 1, "is wrong", "Write 2") if str(error) == "config" else error

    def hangs(self) -> None:
        time.sleep(60)

    def dies(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_is_made_is_kept_in_another_process() -> None:
    beside = Beside(Made)
    _, second = beside.ask(methodcaller("next")), beside.ask(methodcaller("next"))
    process, number = second()  # nobody waits for the first
    assert process != os.getpid() and number == 2
    assert beside.ask(methodcaller("next"))() == (process, 3)
    beside.close()
    assert not psutil.pid_exists(process)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (NotPeriodic("no rule"), NotPeriodic, "no rule"),
        (ValueError("config"), NoPrediction, "key: 1 is wrong. Write 2."),
        (ValueError("text"), RuntimeError, "text"),
    ],
)
def test_what_is_raised_comes_back(error: Exception, kind: type[Exception], message: str) -> None:
    beside = Beside(Made)
    with pytest.raises(kind, match=message):
        beside.ask(methodcaller("fails", error))()
    assert beside.ask(methodcaller("next"))()[1] == 1
    beside.close()
    broken: Beside[Made] = Beside(lambda: Made().fails(error))
    for _ in range(2):
        with pytest.raises(kind, match=message):
            broken.ask(methodcaller("next"))()
    broken.close()


def test_a_process_that_hangs_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_module, "_LONGEST", 0.2)
    beside = Beside(Made)
    answer = beside.ask(methodcaller("hangs"))
    with pytest.raises(RuntimeError, match="has not answered for"):
        answer()
    with pytest.raises(OSError, match="closed"):
        beside.ask(methodcaller("next"))


def test_a_process_that_dies_is_not_waited_for() -> None:
    beside = Beside(Made)
    with pytest.raises((EOFError, OSError)):
        beside.ask(methodcaller("dies"))()
    beside.close()


STARTER = """
import time
from operator import methodcaller
from tests.planner.test_beside import Beside, Made
beside = Beside(Made)
print(beside.ask(methodcaller("next"))()[0], flush=True)
time.sleep(600)
"""


def test_it_ends_with_a_starter_that_is_killed() -> None:
    command = [sys.executable, "-c", STARTER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        beside = psutil.Process(int(starter.stdout.readline()))
        starter.kill()
    end = time.monotonic() + 60
    while beside.is_running() and beside.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.01)
