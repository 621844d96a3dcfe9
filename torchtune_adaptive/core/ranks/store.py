"""Key-value stores of the ranks' own, reachable only from where the ranks are."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchtune_adaptive.common import launcher
from torchtune_adaptive.core.ranks.agreement import Ranks

_LOOPBACK = "127.0.0.1"
_THIS_MACHINE = (_LOOPBACK, "localhost", "::1")


def open_store(ranks: Ranks, timeout: timedelta) -> dist.TCPStore:
    """A store that rank 0 hosts until it drops it; on all ranks at once.

    It listens on loopback if all ranks share a machine, else on rank 0's address in ``MASTER_ADDR``.
    """
    return _open(ranks.is_zero, _host(ranks.size), ranks.from_rank_zero, timeout)


def open_store_of_restart(timeout: timedelta) -> dist.TCPStore:
    """The store in which ranks meet that torchrun has started again on one machine; on all ranks at once.

    torchrun keeps its own store for all attempts, so a rank that is early would find the addresses of
    processes that are gone. A prefix for each attempt is not enough: NCCL's process groups look for errors
    under keys without it, and end at those of an earlier attempt.
    """
    shared, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
    of_attempt = dist.PrefixStore(f"restart {launcher.restarts()}", shared)

    def from_rank_zero(address: Any) -> Any:
        if rank == 0:
            of_attempt.set("address", json.dumps(address))
        return json.loads(of_attempt.get("address"))

    return _open(rank == 0, _LOOPBACK, from_rank_zero, timeout)


def _open(
    is_zero: bool, host: str, from_rank_zero: Callable[[Any], Any], timeout: timedelta
) -> dist.TCPStore:
    """A store that rank 0 hosts; the others learn its address by ``from_rank_zero``."""
    store, port = None, 0
    if is_zero:
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
    host, port = from_rank_zero((host, port))
    if store is None:
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    return store


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
