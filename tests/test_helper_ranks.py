"""The helper that runs ranks: one that hangs, raises or dies fails its test, with what there is to know."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.helpers.ranks import run_ranks, watch_ranks

pytestmark = pytest.mark.ranks


def hang() -> None:
    threading.Event().wait()


def die() -> None:
    os._exit(3)


def crash() -> None:
    os.write(2, b"the reason\n")  # as a library written in C++ does before it aborts
    os.abort()


def raise_an_error() -> None:
    raise ValueError("of this rank")


def threads_and_missing_modules() -> tuple[int, set[str]]:
    imported = set(sys.modules)
    from tests.helpers.preload import MODULES

    return threading.active_count(), set(MODULES) - imported


LOADING: list[Iterator[Any]] = []
"""What still loads data when its rank ends."""


def load_data() -> list[int | None]:
    """The processes that load data for this rank."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # or it has none
    loader: DataLoader[int] = DataLoader(range(8), num_workers=1)  # type: ignore[arg-type]
    LOADING.append(iter(loader))
    next(LOADING[0])
    return [child.pid for child in multiprocessing.active_children()]


def runs(process: int | None) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kind_of_process() -> str:
    return type(multiprocessing.current_process()).__name__


def test_a_hang_fails_with_where_the_rank_was() -> None:
    with pytest.raises(AssertionError, match=r"(?s)ranks \[0\] .* within 2 s.*in hang"):
        run_ranks(hang, 1, timeout=2, join=False)


def test_a_rank_that_should_exit_and_hangs_fails_with_where_it_was() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0 is still running after 2 s.*in hang"):
        watch_ranks(hang, 1, until_exit_of=[0], timeout=2, join=False)


def test_a_rank_that_raises_or_dies_fails_at_once() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0: .*ValueError: of this rank"):
        run_ranks(raise_an_error, 1, join=False)
    with pytest.raises(AssertionError, match="rank 0: the process died, exit code 3"):
        run_ranks(die, 1, join=False)
    with pytest.raises(
        AssertionError, match=r"(?s)exit code -6.*the reason.*Fatal Python error.* in crash"
    ):
        run_ranks(crash, 1, join=False)
    (ended,) = watch_ranks(crash, 1, until_exit_of=[0], join=False)
    assert ended.exit_code == -6 and "in crash" in ended.said


def test_ranks_start_with_one_thread_and_what_they_need_imported() -> None:
    [(threads, missing)] = run_ranks(threads_and_missing_modules, 1, join=False)
    assert threads == 1
    assert not missing


def test_processes_that_load_data_end_with_their_rank() -> None:
    [[process]] = run_ranks(load_data, 1, join=False)
    end = time.monotonic() + 60  # one looks for its parent every 5 seconds
    while runs(process) and time.monotonic() < end:
        time.sleep(0.1)
    assert not runs(process)


@pytest.mark.exhaustive
def test_ranks_that_use_cuda_are_not_forked() -> None:
    assert run_ranks(kind_of_process, 1, join=False, forked=False) == ["SpawnProcess"]
