"""A fork of a process that traces, which traces beside it on another core.

It has what its starter has imported and built, and sends back what it finds. torch can be forked until its
first backward pass, whose threads a fork would not have.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from torchtune_adaptive.common import AdaptiveBatchingError, NoPrediction
from torchtune_adaptive.planner.repetition import NotPeriodic
from torchtune_adaptive.planner.told import listen

_LONGEST = 300.0
"""Seconds that an answer may take; with fewer layers than a model has, it takes some."""
T = TypeVar("T")
R = TypeVar("R")


class Beside(Generic[T]):
    """Calls functions, which are pickled, with something that a fork of this process makes and keeps. It ends
    with this process, however that ends, once it is done with what it works on.

    Raises:
        OSError: there is no room for another process.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._numbers = count()
        arguments = make, self._connection, theirs
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        with theirs:
            self._process.start()

    def ask(self, of: Callable[[T], R]) -> Callable[[], R]:
        """Begin to call a function; what is returned waits for the result, and raises what was raised.

        Raises:
            EOFError, OSError, RuntimeError: the process has ended, or does not answer.
        """
        number = next(self._numbers)
        self._connection.send((number, of))

        def result() -> R:
            while True:
                if not self._connection.poll(_LONGEST):
                    self.close()
                    raise RuntimeError(f"a fork that traces has not answered for {_LONGEST:g} s")
                answered, found = self._connection.recv()
                if answered < number:  # nobody has waited for that
                    continue
                if isinstance(found, Exception):
                    raise found
                return found

        return result

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(make: Callable[[], Any], starters: Connection, connection: Connection) -> None:
    starters.close()  # so that it closes with the starter
    listen(None)
    made = failure = None
    try:
        made = make()
    except Exception as error:
        failure = _portable(error)
    with suppress(EOFError, OSError):
        while True:
            number, of = connection.recv()
            connection.send((number, failure or _answer(of, made)))


def _answer(of: Callable[[Any], Any], made: Any) -> Any:
    try:
        return of(made)
    except Exception as error:
        return _portable(error)


def _portable(error: Exception) -> Exception:
    """The same for another process: one that can be unpickled."""
    if isinstance(error, NotPeriodic):
        return error
    kind = NoPrediction if isinstance(error, AdaptiveBatchingError) else RuntimeError
    return kind(str(error))
