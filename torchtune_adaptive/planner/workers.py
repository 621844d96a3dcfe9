"""Processes that trace: they see no GPU, are not ranks, and do not affect the process that starts them.

There are three ways to start one. ``processes`` is for a program with many questions: each call gets a fresh
process, forked from a server that has imported what they need. ``Worker`` is for a run that trains: a single
process that answers questions until the run ends. It shares nothing with the run but a pipe: a fork server
would also serve the run's own processes (data loaders), which would then see no GPU either. ``call_alone`` is
for functions of a user's own program.

None of them looks for modules of the standard library in the working directory, where a user's ``queue.py``
may be; the user's own modules are still found there.

No torch in here, so that either can be started before the imports.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torchtune_adaptive.common import AdaptiveBatchingError, NoPrediction
from torchtune_adaptive.planner.told import Told, listen

_AT_ONCE = 4
"""The number of processes; each takes up to half a gigabyte."""
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Beginnings of the variables that a launcher sets for a rank."""
_PLATFORM = sysconfig.get_path("platstdlib")
_STANDARD_LIBRARY = {
    sysconfig.get_path("stdlib"),
    _PLATFORM,
    os.path.join(_PLATFORM, "lib-dynload"),
}
T = TypeVar("T")

_STARTS = "importing torch"
"""What a process does until it tells what it does."""
_told: WeakKeyDictionary[Future[Any], Told] = WeakKeyDictionary()
"""What is told of the futures of ``processes``."""
_told_alone: Told | None = None
"""The same of the process of ``call_alone``."""


def told_of(future: Future[Any] | None = None) -> str:
    """What the process is doing that works on a future of ``processes``, or else that of ``call_alone``;
    empty while there is none."""
    told = _told_alone if future is None else _told.get(future)
    return told.words if told is not None else ""


def _standard_library_first(path: list[str]) -> list[str]:
    """The same folders, those of the standard library first. Others keep their order, so that modules of a
    user's program still come before installed ones of the same name."""
    return sorted(path, key=lambda folder: folder not in _STANDARD_LIBRARY)


def _environment() -> dict[str, str]:
    """This process's variables, without what would make a worker a rank or let it see a GPU, and with its
    folders of modules, but not the working directory before all others."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_RANK)}
    return {
        **kept,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(_standard_library_first(sys.path)),
    }


@contextmanager
def _path_for_workers() -> Iterator[None]:
    """A context in which ``sys.path``, which ``multiprocessing`` gives to what it starts, is a worker's."""
    before = sys.path[:]
    sys.path[:] = _standard_library_first(before)
    try:
        yield
    finally:
        sys.path[:] = before + [folder for folder in sys.path if folder not in before]


@contextmanager
def _as_worker() -> Iterator[None]:
    """A context in which processes are started with the variables and the path of a worker."""
    before, theirs = dict(os.environ), _environment()
    try:
        os.environ.clear()
        os.environ.update(theirs)
        with _path_for_workers():
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _uninterruptible() -> Iterator[None]:
    """A context in which processes are started that ignore Ctrl-C, which is for this one. The server ignores
    it by itself, but not before its imports."""
    # Only the main thread can change that.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def start_server(preload: str) -> None:
    """Start the server that ``processes`` forks from; returns before it has imported the module ``preload``,
    which imports what the calls need."""
    multiprocessing.set_forkserver_preload([preload])
    with _as_worker(), _uninterruptible():
        forkserver.ensure_running()


@contextmanager
def processes(preload: str) -> Iterator[Callable[..., Future[Any]]]:
    """A context with a function that calls others, each in its own process. An exception that leaves it, as
    when the user interrupts it, ends those that run."""
    start_server(preload)
    context = multiprocessing.get_context("forkserver")
    pool = ThreadPoolExecutor(min(os.cpu_count() or 1, _AT_ONCE))
    called: list[Future[Any]] = []

    def call(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        told = Told(context)
        called.append(future := pool.submit(_forked, context, told, work, *arguments))
        _told[future] = told
        return future

    with _path_for_workers():
        try:
            yield call
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(one.done() for one in called):
                for child in multiprocessing.active_children():
                    child.kill()
                time.sleep(0.05)  # one may just be starting
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _forked(context: ForkServerContext, told: Told, work: Callable[..., T], *arguments: Any) -> T:
    try:
        return _called(context, told, None, traced, work, *arguments)
    except _Ended as end:
        raise NoPrediction(f"a process that traced {end}.") from None


class Worker:
    """A process that answers questions, and ends with the process that started it, however that ends.

    There, ``make`` is called with the arguments, which are pickled, and returns the function that answers.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, make: Callable[..., Callable[[Any], Any]], *arguments: Any) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                env=_environment(),
                stdin=subprocess.PIPE,  # closes when this process ends
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._connection.send((make, arguments))

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
                f"the planner process ended without an answer: it {self._end()} "
                "(`tune-adaptive plan` may show more)"
            ) from None
        if isinstance(answer, NoPrediction):
            raise answer
        return answer

    def _end(self) -> str:
        try:
            return _how(self._process.wait(_TO_END))
        except subprocess.TimeoutExpired:
            return _how(None)

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
    global _told_alone
    context = multiprocessing.get_context("spawn")
    _told_alone = told = Told(context)
    try:
        return _called(context, told, timeout, work, *arguments, started=_as_worker)
    except _Ended as end:
        script = (
            'Call plan_batch_size under if __name__ == "__main__": where the program is a script.'
        )
        advice = f" {script}" if end.status == 1 else ""
        raise NoPrediction(f"The process that traces {end}.{advice}") from None


class _Ended(Exception):
    """A process that was to answer has ended, or could not be started; the message says how."""

    def __init__(self, how: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(how)


_TO_END = 5.0
"""Seconds that a process may take to end after it has closed its pipe."""


def _how(status: int | None) -> str:
    """How a process ended, by its exit status: negative where a signal killed it."""
    if status is None:
        return "ended without an answer"
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    memory = ", perhaps because this machine has too little memory for it (each takes half a GiB)"
    return f"was killed by {name}{memory if -status == signal.SIGKILL else ''}"


def _called(
    context: ForkServerContext | SpawnContext,
    told: Told,
    timeout: float | None,
    work: Callable[..., T],
    *arguments: Any,
    started: Callable[[], Any] = nullcontext,
) -> T:
    """The result of a function in a process of its own, which is ``started`` in that context, and for which
    ``told`` has words as long as it runs.

    Raises:
        NoPrediction: there is none within ``timeout`` seconds, or the function raised it.
        _Ended: the process ended, or could not be started.
    """
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_once, args=(theirs, told))
    told.words = _STARTS
    try:
        with theirs, started():
            process.start()
        ours.send((work, arguments))
        if not ours.poll(timeout):
            raise NoPrediction(f"Tracing took more than {timeout:g} s. Allow more (timeout).")
        answer = ours.recv()
    except (EOFError, OSError) as error:
        if process.pid is None:
            raise _Ended(f"could not be started ({_one_line(error)})") from None
        process.join(_TO_END)
        raise _Ended(_how(process.exitcode), process.exitcode) from None
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        told.words = ""  # the last that it has told is over, however it ended
        ours.close()
    if isinstance(answer, AdaptiveBatchingError):
        raise answer
    return answer


def _serve_once(connection: Connection, told: Told) -> None:
    listen(told)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the starter, which ends this one
    threading.Thread(target=_end_with_starter, daemon=True).start()
    _be_quiet()
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
    _be_quiet()
    try:
        return work(*arguments)
    except NoPrediction:
        raise
    except Exception as error:
        reason = f"A step of this config could not be traced: {_one_line(error)}"
        raise NoPrediction(reason) from None


def _be_quiet() -> None:
    """Let torch and other libraries report nothing: it would be on a run, and there is none."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


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
