"""Processes that trace: they see no GPU, are not ranks, and do not affect the process that starts them.

There are three ways to start one. ``processes`` is for a program with many questions: each call gets a fresh
process, forked from a server that has imported what they need. ``Worker`` is for a run that trains: a single
process that answers questions until the run ends. It shares nothing with the run but a pipe: a fork server
would also serve the run's own processes (data loaders), which would then see no GPU either. ``call_alone`` is
for functions of a user's own program.

No torch in here, so that either can be started before the imports.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeVar

from torchtune_adaptive.common import AdaptiveBatchingError, NoPrediction

_AT_ONCE = 4
"""The number of processes; each takes up to half a gigabyte."""
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Beginnings of the variables that a launcher sets for a rank."""
T = TypeVar("T")


def _environment() -> dict[str, str]:
    """This process's variables, without what would make a worker a rank or let it see a GPU."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_RANK)}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@contextmanager
def _as_worker() -> Iterator[None]:
    """A context in which processes are started with the variables of a worker."""
    before, theirs = dict(os.environ), _environment()
    try:
        os.environ.clear()
        os.environ.update(theirs)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def start_server(preload: str) -> None:
    """Start the server that ``processes`` forks from; returns before it has imported the module ``preload``,
    which imports what the calls need."""
    multiprocessing.set_forkserver_preload([preload])
    with _as_worker():
        forkserver.ensure_running()


@contextmanager
def processes(preload: str) -> Iterator[Callable[..., Future[Any]]]:
    """A context with a function that calls others, each in its own process."""
    start_server(preload)
    context = multiprocessing.get_context("forkserver")
    at_once = min(os.cpu_count() or 1, _AT_ONCE)
    pool = ProcessPoolExecutor(at_once, context, max_tasks_per_child=1)
    try:
        yield lambda work, *arguments: pool.submit(traced, work, *arguments)
    finally:
        pool.shutdown(cancel_futures=True)


class Worker:
    """A process that answers questions, and ends with the process that started it, however that ends.

    Args:
        make: the function that is called in the process with the arguments, which are pickled, and returns
            the one that answers questions.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, make: Callable[..., Callable[[Any], Any]], *arguments: Any) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                env={**_environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.PIPE,  # closes when this process ends
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._connection.send((make, arguments))

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, question: Any, timeout: float) -> Any:
        """The answer to a question.

        Raises:
            NoPrediction: there is none within ``timeout`` seconds.
        """
        try:
            self._connection.send(question)
            if not self._connection.poll(timeout):
                raise NoPrediction(f"no answer within {timeout:g} s")
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise NoPrediction(
                "the planner process ended without an answer (`tune-adaptive plan` may show why)"
            ) from None
        if isinstance(answer, NoPrediction):
            raise answer
        return answer

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._connection.close()


def call_alone(work: Callable[..., T], *arguments: Any, timeout: float) -> T:
    """Call a function in a process that ends with it. Unlike a ``Worker``, the process knows the functions of
    the user's own program, which it imports as ``multiprocessing`` does.

    Raises:
        NoPrediction: there is no result within ``timeout`` seconds.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_once, args=(theirs,), daemon=True)
    try:
        with theirs, _as_worker():
            process.start()
        ours.send((work, arguments))
        if not ours.poll(timeout):
            raise NoPrediction(f"Tracing took more than {timeout:g} s. Allow more (timeout).")
        answer = ours.recv()
    except (EOFError, OSError):
        raise NoPrediction(
            "The process that traces ended without an answer. Call plan_batch_size under "
            'if __name__ == "__main__": where the program is a script.'
        ) from None
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        ours.close()
    if isinstance(answer, AdaptiveBatchingError):
        raise answer
    return answer


def _serve_once(connection: Connection) -> None:
    threading.Thread(target=_end_with_starter, daemon=True).start()
    try:
        work, arguments = connection.recv()
        answer = work(*arguments)
    except AdaptiveBatchingError as error:
        answer = error
    except Exception as error:
        answer = NoPrediction(f"The step could not be traced: {_one_line(error)}")
    connection.send(answer)


def _end_with_starter() -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None
    starter.join()
    os._exit(0)


def traced(work: Callable[..., T], *arguments: Any) -> T:
    """Call a function that traces; every failure is a ``NoPrediction``, which any process can unpickle."""
    logging.disable(logging.WARNING)  # torch and torchtune report on a run, and there is none
    warnings.simplefilter("ignore")
    try:
        return work(*arguments)
    except NoPrediction:
        raise
    except Exception as error:
        reason = f"A step of this config could not be traced: {_one_line(error)}"
        raise NoPrediction(reason) from None


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _serve(connection: Connection) -> None:
    """Answer questions for ever: the process is killed, or ends with the one that asks."""
    failure: NoPrediction | None = None
    try:
        make, arguments = traced(connection.recv)
        answer = traced(make, *arguments)
    except NoPrediction as error:
        failure = error
    while True:
        question = connection.recv()
        try:
            connection.send(failure or traced(answer, question))
        except NoPrediction as error:
            connection.send(error)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _serve(Connection(int(sys.argv[1])))
