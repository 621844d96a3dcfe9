"""The network that gloo uses."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable


def gloo_interface(nccl: str, interfaces: Iterable[str]) -> str | None:
    """The first of ``interfaces`` that ``nccl``, a value of ``NCCL_SOCKET_IFNAME``, allows.

    NCCL takes a list of prefixes, of names after ``=``, or of what to leave out after ``^`` or ``^=``; gloo
    takes names only.
    """
    leave_out = nccl.startswith("^")
    names = nccl.removeprefix("^")
    exact = names.startswith("=")
    wanted = [name for name in names.removeprefix("=").split(",") if name]

    def allowed(interface: str) -> bool:
        listed = any(interface == name if exact else interface.startswith(name) for name in wanted)
        return not listed and interface != "lo" if leave_out else listed

    return next((interface for interface in interfaces if allowed(interface)), None)


def let_gloo_use_the_interface_of_nccl() -> None:
    """Tell gloo where only NCCL has been told which network to use: a host's name may resolve to loopback."""
    nccl = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if not nccl or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    interface = gloo_interface(nccl, [name for _, name in socket.if_nameindex()])
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
