"""Key-value stores of the ranks' own, reachable only from where the ranks are."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from torchtune_adaptive.common import RankLost, launcher, network
from torchtune_adaptive.core.ranks.agreement import Ranks

_LOOPBACK = "127.0.0.1"
_THIS_MACHINE = (_LOOPBACK, "localhost", "::1")
_ADDRESS, _EXPECTS = "address of the attempt", "ranks of the attempt"
_ANSWER = timedelta(seconds=60)  # a store that lives answers at once, but a machine may be busy
_REACHED = 5.0  # seconds; its machine may be gone, and the next address be there meanwhile
_PAUSE = 0.1


def open_store(ranks: Ranks, timeout: timedelta) -> dist.TCPStore:
    """A store that rank 0 hosts until it drops it; on all ranks at once.

    It listens on loopback if all ranks share a machine, else on rank 0's address in ``MASTER_ADDR``. Its
    answers may take as long as ``timeout``. Connecting may take longer, as where a name server is asked.
    """
    to_connect = max(timeout, _ANSWER)
    if ranks.is_zero:
        store, address = _hosted(_host(ranks.size), to_connect)
        ranks.from_rank_zero(address)
    else:
        host, port = ranks.from_rank_zero(("", 0))
        store = _connected(
            lambda: dist.TCPStore(host, port, timeout=to_connect), to_connect.total_seconds()
        )
    store.set_timeout(timeout)
    return store


def open_store_of_attempt(timeout: timedelta) -> dist.TCPStore:
    """A store in which the ranks of one attempt meet that torchrun may start again; on all ranks at once.

    torchrun keeps its own store for all attempts, so a rank that is early would find the addresses of
    processes that are gone. A prefix for each attempt would not do: launchers of several machines count
    attempts differently, and NCCL's process groups look for errors under keys without it. So rank 0 hosts a
    new store, and the others try what they find until it is one that expects them.

    Raises:
        RankLost: they have not met within ``timeout``.
    """
    began, size, rank = time.monotonic(), launcher.size(), launcher.rank()
    to_answer = min(timeout, _ANSWER)
    try:
        shared = _connected(
            lambda: next(dist.rendezvous("env://", timeout=to_answer))[0],
            to_answer.total_seconds() + _REACHED,
        )
    except RuntimeError as error:
        raise RankLost(
            f"the store of torchrun at {os.environ.get('MASTER_ADDR')} does not answer ({error}). If the "
            "machine that holds it is gone, this attempt cannot begin."
        ) from error
    if rank == 0:
        store, address = _hosted(_host(size), timeout)
        store.set(_EXPECTS, str(size))
        shared.set(_ADDRESS, json.dumps(address))
        _wait_for_all(store, size, began + timeout.total_seconds())
        return store
    while time.monotonic() - began < timeout.total_seconds():
        with suppress(OSError, RuntimeError):  # the address is of an earlier attempt
            if shared.check([_ADDRESS]):
                host, port = json.loads(shared.get(_ADDRESS))
                if (joined := _joined(host, port, rank, size)) is not None:
                    joined.set_timeout(timeout)
                    return joined
        time.sleep(_PAUSE)
    raise RankLost(f"rank 0 has not begun this attempt within {timeout.total_seconds():g} s.")


def _joined(host: str, port: int, rank: int, size: int) -> dist.TCPStore | None:
    """The store at an address, if it expects this rank: its attempt has so many, and this is the first of its
    number that comes."""
    socket.create_connection((host, port), timeout=_REACHED).close()
    # It may be closed just now, and torch tries to connect until the time is up.
    reached = timedelta(seconds=_REACHED)
    store = _connected(lambda: dist.TCPStore(host, port, timeout=reached), 2 * _REACHED)
    store.set_timeout(_ANSWER)
    expects = store.check([_EXPECTS]) and int(store.get(_EXPECTS)) == size
    return store if expects and store.add(_is_here(rank), 1) == 1 else None


def _connected(connect: Callable[[], dist.TCPStore], limit: float) -> dist.TCPStore:
    """The store that ``connect`` connects to, within so many seconds.

    torch waits for a store's first answer without a limit, and the port may be anybody's by now, or of a
    process that is stopped. So a thread waits, which may be left behind.
    """
    try:
        return network.within(limit, connect)
    except TimeoutError:
        raise RankLost(
            f"a store has taken the connection and said nothing for {limit:g} s"
        ) from None


def _wait_for_all(store: dist.TCPStore, size: int, end: float) -> None:
    """Wait until all ranks have found the store; on rank 0.

    Raises:
        RankLost: some have not come before ``end``.
    """
    others = [_is_here(rank) for rank in range(1, size)]
    while not store.check(others):
        if time.monotonic() > end:
            missing = [str(rank) for rank in range(1, size) if not store.check([_is_here(rank)])]
            raise RankLost(
                f"lost {'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing)}, which did not begin "
                "this attempt in time. With static rendezvous a launcher does not learn that the ranks of "
                "others have ended, and waits for one of its own that is stopped: use --rdzv_backend c10d."
            )
        time.sleep(_PAUSE)


def _is_here(rank: int) -> str:
    return f"rank {rank} is here"


def _hosted(host: str, timeout: timedelta) -> tuple[dist.TCPStore, tuple[str, int]]:
    """A store of this process, and its address."""
    listener = _listen(host)
    port = listener.getsockname()[1]
    # The store binds to every interface unless it is given a socket that is bound already.
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, (host, port)


def _host(ranks: int) -> str:
    """The name under which the ranks reach rank 0."""
    if launcher.local_size() == ranks:
        return _LOOPBACK
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def _listen(host: str) -> socket.socket:
    """A socket that listens on the address of ``host`` alone.

    Where that is not possible it listens on every address: ``host`` may be one that others see and this
    machine does not have (a translated address), or resolve to loopback here and to another address there.
    """
    with suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        ip = str(address[0])
        if host in _THIS_MACHINE or not ipaddress.ip_address(ip).is_loopback:
            return socket.create_server((ip, 0), family=family)
    return socket.create_server(("", 0))
