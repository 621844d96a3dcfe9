"""The store in which the ranks of one attempt meet, though torchrun has one for all attempts."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.ranks import Alone
from torchtune_adaptive.common import RankLost
from torchtune_adaptive.core import open_store_of_attempt
from torchtune_adaptive.core.ranks import store


@pytest.fixture
def of_torchrun(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store of torchrun's; this process is rank 0 of three."""
    shared = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launched = {
        **{"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"},
        **{"MASTER_PORT": f"{shared.port}", "TORCHELASTIC_USE_AGENT_STORE": "True"},
    }
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    return shared


def join(shared: dist.TCPStore, *ranks: int) -> threading.Thread:
    """Let these ranks find the store of rank 0, a moment after it begins."""

    def find() -> None:
        host, port = json.loads(shared.get(store._ADDRESS))
        for rank in ranks:
            assert store._joined(host, port, rank, 3) is not None

    thread = threading.Thread(target=find, daemon=True)
    thread.start()
    return thread


def test_rank_0_waits_for_all(of_torchrun: dist.TCPStore) -> None:
    joining = join(of_torchrun, 1, 2)
    open_store_of_attempt(timedelta(seconds=60))
    joining.join(timeout=60)
    assert not joining.is_alive()


def test_the_ranks_that_do_not_come_are_named(of_torchrun: dist.TCPStore) -> None:
    """As where a launcher waits for a rank that is stopped."""
    join(of_torchrun, 1)
    with pytest.raises(RankLost, match=r"lost rank 2, which .*: use --rdzv_backend c10d"):
        open_store_of_attempt(timedelta(seconds=2))


def test_a_store_that_is_closing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an earlier attempt, which the first connection finds open and the second one closed."""
    monkeypatch.setattr(store, "_REACHED", 0.5)
    monkeypatch.setattr(store, "_ANSWER", timedelta(hours=1))
    listener, given_up = socket.create_server(("127.0.0.1", 0)), threading.Event()
    host, port = listener.getsockname()
    create_connection = socket.create_connection

    def connect_and_close(*arguments: Any, **options: Any) -> socket.socket:
        connected = create_connection(*arguments, **options)
        listener.close()
        return connected

    def find() -> None:
        with pytest.raises(RuntimeError):
            store._joined(host, port, 1, 2)
        given_up.set()

    monkeypatch.setattr(store.socket, "create_connection", connect_and_close)
    threading.Thread(target=find, daemon=True).start()
    assert given_up.wait(timeout=60)


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """The address of a port that takes connections, as the kernel does for a process that is stopped, and
    answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()


def in_time(work: Callable[[], Any]) -> Any:
    """What this gives; where it hangs, so does a thread only."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(timeout=30)


def test_a_port_that_is_somebody_elses_by_now_and_silent_is_given_up(
    of_torchrun: dist.TCPStore, silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared store has the address of an earlier attempt, until rank 0 writes that of this one."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(store, "_REACHED", 0.5)
    of_torchrun.set(store._ADDRESS, json.dumps(silent))
    hosted, address = store._hosted("127.0.0.1", timedelta(seconds=60))
    hosted.set(store._EXPECTS, "3")
    begin = threading.Timer(1.5, of_torchrun.set, [store._ADDRESS, json.dumps(address)])
    begin.start()
    joined = in_time(lambda: open_store_of_attempt(timedelta(seconds=20)))
    assert joined.port == address[1]
    begin.join()


def test_a_launcher_that_is_stopped_is_named(
    of_torchrun: dist.TCPStore, silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", str(silent[1]))
    monkeypatch.setattr(store, "_ANSWER", timedelta(seconds=0.5))
    monkeypatch.setattr(store, "_REACHED", 0.5)
    with pytest.raises(RankLost, match=r"127.0.0.1 does not answer \(a store .* nothing for 1 s\)"):
        in_time(lambda: open_store_of_attempt(timedelta(seconds=20)))


def test_a_rank_0_that_is_stopped_before_its_store_answers_is_lost(
    silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class SecondOfTwo(Alone):
        is_zero = False

        def from_rank_zero(self, value: Any) -> Any:
            return silent

    monkeypatch.setattr(store, "_ANSWER", timedelta(seconds=0.5))
    with pytest.raises(RankLost, match=r"a store has taken the connection and said nothing"):
        in_time(lambda: store.open_store(SecondOfTwo(2), timedelta(seconds=0.5)))
