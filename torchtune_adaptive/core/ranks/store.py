"""The ranks' own key-value store, reachable only from where the ranks are."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from torchtune_adaptive.common import launcher
from torchtune_adaptive.core.ranks.agreement import Ranks

_LOOPBACK = "127.0.0.1"
_THIS_MACHINE = (_LOOPBACK, "localhost", "::1")


def open_store(ranks: Ranks, timeout: timedelta) -> dist.TCPStore:
    """A store that rank 0 hosts until it drops it; on all ranks at once.

    It listens on loopback if all ranks share a machine, else on rank 0's address in ``MASTER_ADDR``.
    """
    store, host, port = None, "", 0
    if ranks.is_zero:
        host = _host(ranks.size)
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
    host, port = ranks.from_rank_zero((host, port))
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
