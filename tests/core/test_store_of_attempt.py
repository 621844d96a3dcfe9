"""The store in which the ranks of one attempt meet, though torchrun has one for all attempts."""

from __future__ import annotations

import json
import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

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
