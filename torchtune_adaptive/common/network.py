"""The network that gloo uses, how many connections it makes, and answers that may never come."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")

_LAZY = "TORCH_GLOO_LAZY_INIT"
"""torch's variable that says whether gloo connects two ranks when they first exchange something."""
_NO = ("0", "n", "no", "f", "false")


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


@contextmanager
def connected_when_used() -> Iterator[bool]:
    """A context in which gloo connects two ranks of a new group when they first exchange something.

    Otherwise each rank has a connection to every other one in each group. Gives whether it is so: a user who
    has set the variable has decided.
    """
    if _LAZY in os.environ:
        yield os.environ[_LAZY].lower() not in _NO
        return
    os.environ[_LAZY] = "1"
    try:
        yield True
    finally:
        del os.environ[_LAZY]  # the groups of others are as they were


def allow_many_connections() -> None:
    """Let this process open as many files, which connections count as, as its system lets it.

    Many systems start processes with a limit of 1024, which programs are meant to raise themselves.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # macOS says "unlimited", and refuses it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def within(seconds: float, work: Callable[[], T]) -> T:
    """The result of ``work``.

    Raises:
        TimeoutError: it is not there in time. The thread that waits for it ends with the program.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer in {seconds:g} s") from None
