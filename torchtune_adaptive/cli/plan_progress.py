"""The progress of a plan, which says what is being traced:

    tracing 3 of 17 for alternatives: backward pass, layer 3 of 5, 2 rows, model 2 of 2 for 32 layers, 40 s

It is on stderr: rewritten in place on a terminal, else plain lines.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from torchtune_adaptive.planner import told_of

T = TypeVar("T")
_IN_PLACE, _IN_LINES = 1.0, 30.0
"""Seconds after which the state is said again; tracing a large model takes minutes."""


class Interrupted(Exception):
    """The user has interrupted a plan after its first answer, whose ``verdict`` stays."""

    def __init__(self, verdict: str, left: Sequence[str]) -> None:
        self.verdict = verdict
        super().__init__(f"Interrupted. Not finished: {', '.join(left)}.")


def with_progress(work: Callable[[], T]) -> T:
    """Call a function that takes seconds, and keep saying that tracing goes on."""
    done: Future[None] = Future()
    with TraceProgress(1, lambda _: told_of()) as progress:
        progress.follow(done)
        threading.Thread(target=progress.wait, daemon=True).start()
        try:
            return work()  # in this thread, which Ctrl-C interrupts
        finally:
            done.set_result(None)


class TraceProgress:
    """Counts traces that are done, of those expected, and says what ``told_of`` tells of the one that is
    waited for. Use as a context, which leaves a clean line."""

    def __init__(self, expected: int, told_of: Callable[[Future[Any]], str] = lambda _: "") -> None:
        self._expected, self._told_of = expected, told_of
        self._done = 0
        self._in_place = sys.stderr.isatty()
        self._started = time.monotonic()
        self._lock = threading.Lock()  # futures call back from a thread of the pool
        self._followed: dict[Future[Any], str] = {}
        self._verdict: str | None = None
        self._left: list[str] = ["anything else"]

    def follow(self, future: Future[Any], work: str = "") -> None:
        """Count a future once it is done, and say what it works on if it never is."""
        self._followed[future] = work
        future.add_done_callback(self._count)

    def wait(self, *futures: Future[Any]) -> None:
        """Wait for these, or for all, and keep saying that tracing goes on."""
        every = _IN_PLACE if self._in_place else _IN_LINES
        try:
            while wait(futures or self._followed, every).not_done:
                with self._lock:
                    self._show()
        except KeyboardInterrupt:
            left = Counter(work for one, work in self._followed.items() if not one.done())
            self._left = [f"{work} ({n})" if n > 1 else work for work, n in left.items()]
            raise

    def expect_more(self, number: int) -> None:
        with self._lock:
            self._expected += number

    def print(self, text: str, verdict: str | None = None) -> None:
        """Print an answer to stdout, between two states of the line. If it has a ``verdict``, an interruption
        after it is one that keeps it: ``Interrupted``."""
        self._verdict = verdict
        with self._lock:
            self._clear()
            print(text, end="", flush=True)

    def __enter__(self) -> TraceProgress:
        with self._lock:
            self._show()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            self._expected = self._done
            self._clear()
        if self._verdict is not None and kind is KeyboardInterrupt:
            raise Interrupted(self._verdict, self._left) from None

    def _count(self, future: Future[Any]) -> None:
        with self._lock:
            if not future.cancelled():
                self._done += 1
                self._show()

    def _show(self) -> None:
        if self._done < self._expected:
            seconds = time.monotonic() - self._started
            passed = f", {seconds:.0f} s" if seconds >= 1 else ""
            waited_for = ((one, work) for one, work in self._followed.items() if not one.done())
            one, work = next(waited_for, (None, ""))
            doing = self._told_of(one) if one is not None else ""
            text = f"tracing {self._done + 1} of {self._expected}"
            text += f" for {work}" * bool(work) + f": {doing}" * bool(doing)
            if self._in_place:
                most = shutil.get_terminal_size().columns - len(passed) - 1
                text = textwrap.shorten(text, most, placeholder=" ...")  # one that wraps would stay
            text += passed
            if self._in_place:
                print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
            else:
                print(text, file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self._in_place:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
