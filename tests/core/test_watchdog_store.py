"""The watchdog's key-value store: who reaches it, what a stranger can do to it, and how it ends."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.ranks import Alone, run_ranks, watch_ranks
from torchtune_adaptive.core.ranks import store as store_module
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.ranks.watchdog import Watchdog

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]

LIMIT = 5.0
LIFETIMES = 20


def attacked() -> None:
    """Rank 1 plays a stranger that knows the port and the names of the keys."""
    logging.getLogger("torchtune_adaptive").addHandler(logging.StreamHandler())
    ranks = Ranks(timeout=200)
    watchdog = Watchdog(ranks, limit=LIMIT)
    with watchdog:
        assert watchdog._store is not None
        port = watchdog._store.port
        if ranks.rank == 1:
            for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(noise)
            stranger = dist.TCPStore("127.0.0.1", port, is_master=False)
            end = time.monotonic() + 2 * LIMIT
            while time.monotonic() < end:
                # Some beats without a pause, so that every rank reads it; then a sign of life gets through.
                burst = time.monotonic() + 5 * watchdog._beat
                while time.monotonic() < burst:
                    stranger.set("sign of life of rank 1", b'{"stopped": "x", "progress": "y"}')
                    stranger.delete_key("sign of life of rank 0")
                    stranger.set("sign of life of rank 0", b"\xff\x00 not even text")
                time.sleep(5 * watchdog._beat)
        ranks.any(False)


def test_a_stranger_cannot_end_the_run_and_is_reported_once() -> None:
    ranks = watch_ranks(attacked, 2, until_exit_of=[0, 1])
    assert [rank.exit_code for rank in ranks] == [0, 0], ranks
    reports = [rank.said.count("no rank of this run has written") for rank in ranks]
    assert reports == [1, 1], ranks


def reach(addresses: list[str]) -> list[bool]:
    ranks = Ranks(timeout=200)
    reached = []
    with Watchdog(ranks, limit=LIMIT) as watchdog:
        assert watchdog._store is not None
        for address in addresses:
            try:
                socket.create_connection((address, watchdog._store.port), timeout=1).close()
                reached.append(True)
            except OSError:
                reached.append(False)
        ranks.any(False)
    return reached


def test_ranks_on_one_machine_listen_on_loopback_alone() -> None:
    # 127.0.0.2 is this machine as well: what listens on every address listens there.
    for reached in run_ranks(reach, 2, ["127.0.0.1", "127.0.0.2"]):
        assert reached == [True, False]


@pytest.mark.parametrize(
    ("host", "resolves_to", "listens_on"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("node0", "127.0.0.2", "0.0.0.0"),  # to others it is another address
        ("node0", "192.0.2.1", "0.0.0.0"),  # not an address of this machine: translated
        ("no-such-host.invalid", None, "0.0.0.0"),
    ],
)
def test_several_machines_listen_where_rank_0_is_reached(
    monkeypatch: pytest.MonkeyPatch, host: str, resolves_to: str | None, listens_on: str
) -> None:
    if resolves_to is not None:
        answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolves_to, 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    with store_module._listen(host) as listener:
        assert listener.getsockname()[0] == listens_on


def test_the_address_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert store_module._host(8) == "127.0.0.1"
    assert store_module._host(16) == "node0"
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert store_module._host(8) == "node0", "unknown: they may be on several machines"


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))  # those of C++ as well


def live_and_end() -> list[int]:
    """The threads of this process before a run of watched ranks and after it, again and again."""
    seen = [threads()]
    for _ in range(LIFETIMES):
        ranks = Ranks(timeout=200)
        with Watchdog(ranks, limit=LIMIT) as watchdog:
            watchdog.enter("a phase", patience=None)
            ranks.any(False)
        ranks.close()
        seen.append(threads())
    return seen


def test_connecting_may_take_longer_than_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[timedelta] = []

    class Store:
        def __init__(
            self, *_: Any, timeout: timedelta, master_listen_fd: int | None = None, **__: Any
        ) -> None:
            limits.append(timeout)
            if master_listen_fd is not None:
                os.close(master_listen_fd)

        def set_timeout(self, timeout: timedelta) -> None:
            limits.append(timeout)

    class Second(Alone):
        def from_rank_zero(self, value: Any) -> Any:
            return "127.0.0.1", 1

    monkeypatch.setattr(store_module.dist, "TCPStore", Store)
    second = Second(2)
    second.rank = 1
    for ranks in (Alone(2), second):
        for limit in (timedelta(seconds=5), timedelta(minutes=5)):
            store_module.open_store(ranks, limit)
            connecting, answering = limits[-2:]
            assert connecting == max(limit, timedelta(minutes=1)) and answering == limit
    assert len(limits) == 8


def test_no_thread_is_left_when_a_run_has_ended() -> None:
    """A thread of a process group that waits for the interpreter while that ends makes it abort."""
    for before, *after in run_ranks(live_and_end, 2):
        assert after == [before] * LIFETIMES


def leave_late() -> float:
    ranks = Ranks(timeout=200)
    watchdog = Watchdog(ranks, limit=2 * LIMIT)
    with watchdog:
        if ranks.rank == 1:
            last_sign = watchdog._publish

            def late() -> None:
                time.sleep(1.0)
                last_sign()

            watchdog._publish = late  # type: ignore[method-assign]
        ranks.any(False)
        started = time.monotonic()
    return time.monotonic() - started


def test_the_host_of_the_store_leaves_last() -> None:
    host, _ = run_ranks(leave_late, 2)
    assert host > 0.9


ENDS_WHILE_A_THREAD_WAITS = """
import os, sys, time
import torch.distributed as dist
from torchtune_adaptive.core.ranks.agreement import Ranks

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
ranks = Ranks(timeout=30)
ranks.any(False)
held = ranks._group  # as a device mesh holds one
if rank == 0:  # keep the lock of the interpreter from before the last collective ends
    sys.setswitchinterval(100)
    dist.all_reduce(ranks._ends, group=held, async_op=True)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        pass
else:
    time.sleep(0.5)
    ranks.any(False)
    time.sleep(2)
if sys.argv[3] == "closed":
    ranks.close()
"""


@pytest.mark.parametrize("ending", ["closed", "open"])
def test_a_rank_that_finished_exits_with_0(ending: str) -> None:
    """Real interpreters, which end for good: the processes of the other tests skip that."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS_WHILE_A_THREAD_WAITS, str(rank), str(store.port), ending],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [(rank.communicate(timeout=300)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ended] == [0, 0], ended
