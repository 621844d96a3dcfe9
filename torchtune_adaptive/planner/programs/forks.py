"""Forks of a program: for each depth of its models one, which waits where training begins.

Of that, one goes on with each number of rows. So what precedes training is done once for each depth.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch


class IsFork(BaseException):
    """This process is a fork, which goes on with the program."""


class Fork:
    """A fork, as the process sees it that it comes from: it runs on as often as it is asked."""

    def __init__(self, process: int, connection: Connection) -> None:
        self._process, self._connection = process, connection
        self._found: list[Any] = []
        self._asked = 0

    def ask(self, what: Any) -> Callable[[], Any]:
        """Ask it something; what is returned waits for the answer, or says how it ended."""
        number, self._asked = self._asked, self._asked + 1
        with suppress(OSError):  # it has ended: what it has sent is still there
            self._connection.send(what)
        return lambda: self._answer(number)

    def _answer(self, number: int) -> Any:
        while len(self._found) <= number:
            try:
                self._found.append(self._connection.recv())
            except (EOFError, OSError):
                status = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
                self._process = 0
                last = self._found[-1:] if status == 0 else [how(status)]
                self._found += last * (self._asked - len(self._found))
        return self._found[number]

    def let_go(self) -> None:
        """Close this process's side, in a fork of it."""
        self._connection.close()

    def end(self) -> None:
        """End it."""
        self._connection.close()
        if self._process:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)


class Questions:
    """What a fork is asked for, as it sees that itself."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def serve(self, begin: Callable[[Any], None]) -> None:
        """Fork for each question. A fork begins with it, and returns from here."""
        gc.collect()
        gc.freeze()  # so that forks need not look through what was there before
        while True:
            try:
                what = self._connection.recv()
            except (EOFError, OSError):  # nobody asks any more
                os._exit(0)
            child = os.fork()
            if not child:
                torch.set_num_threads(1)
                begin(what)
                return
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status:
                self._connection.send(how(status))

    def leave(self, found: Any) -> NoReturn:
        """Send what has been found, and end."""
        try:
            self._connection.send(found)
        finally:  # whatever happens, it does not go on with what the other process does
            os._exit(0)


def forked(others: Iterable[Fork]) -> Fork | Questions:
    """Fork this process, which has other forks: what each of the two has of the other."""
    ours, theirs = Pipe()
    process = os.fork()
    if process:
        theirs.close()
        return Fork(process, ours)
    ours.close()
    for other in others:
        other.let_go()  # so that each learns when the process has ended that asks
    torch.set_num_threads(1)
    return Questions(theirs)


def how(status: int) -> str:
    """How a process has ended."""
    return signal.Signals(-status).name if status < 0 else f"status {status}"
