"""Answers to queries: from remembered traces where they are enough, by tracing where they are not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
)
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torchtune_adaptive.planner import processes, told_of, traced
from torchtune_adaptive.recipe import NotRemembered, PassedCheck, Query

_PRELOAD = "torchtune_adaptive.recipe.plan.preload"
_LESS_URGENT = 10
"""How much nicer a process is whose answer is not the first one, which takes two processors where it can."""


class Answers:
    """Answers queries in other processes. Use as a context.

    Remembered traces need no torch, so the processes that read them start at once. Those that import torch,
    which takes seconds, are only started if something has to be traced.
    """

    def __init__(self, cache: bool | str) -> None:
        self._cache = cache  # the run's setting of the folder where traces are kept
        self._undo = ExitStack()
        self._lock = threading.Lock()  # answers arrive in threads of the pools
        self._quick: Executor | None = None
        self._trace: Callable[..., Future[Any]] | None = None
        self._checked: Future[None] | None = None
        self._traced: dict[Future[Any], Future[Any]] = {}
        """What is traced for an answer."""
        self._ends = False

    def __enter__(self) -> Answers:
        # What was traced before the self-check had passed is not to be relied on.
        if self._cache is not False and PassedCheck(self._cache).is_known():
            at_once = min(os.cpu_count() or 1, 2)
            ignore = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for this process, which ends them
            context = multiprocessing.get_context("fork")
            self._quick = ProcessPoolExecutor(at_once, context, signal.signal, ignore)
            self._undo.callback(self._quick.shutdown)
        else:
            self._start_tracing()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self._ends = True
        if self._quick is not None:
            self._quick.shutdown(wait=False, cancel_futures=True)
        if kind is not None:  # nobody waits for what is worked on
            for child in multiprocessing.active_children():
                child.kill()
        self._undo.__exit__(kind, *error)

    def ask(
        self, work: Callable[..., Any], query: Query, *arguments: Any, urgent: bool = False
    ) -> Future[Any]:
        """The result of ``work(query, *arguments)``, once it is there. What is not ``urgent`` leaves the
        processors to what is."""
        if self._quick is None:
            return self._traced_anew(urgent, work, query, *arguments)
        answer: Future[Any] = Future()

        def take(done: Future[Any]) -> None:
            if done.cancelled() or self._ends:
                answer.cancel()
            elif isinstance(error := done.exception(), (NotRemembered, BrokenExecutor)):
                self._traced[answer] = self._traced_anew(urgent, work, query, *arguments)
                self._traced[answer].add_done_callback(take)
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(done.result())

        remembered = replace(query, may_trace=False)
        try:
            self._quick.submit(traced, work, remembered, *arguments).add_done_callback(take)
        except BrokenExecutor:  # one of its processes was killed
            return self._traced_anew(urgent, work, query, *arguments)
        return answer

    def told_of(self, answer: Future[Any]) -> str:
        """What is being done for an answer; empty if nothing is traced for it, or not yet."""
        return told_of(self._traced.get(answer, answer))

    def checked(self) -> None:
        """Wait for the self-check, if something is traced.

        Raises:
            NoPrediction: it failed.
        """
        with self._lock:
            checked = self._checked
        if checked is not None:
            checked.result()

    def _traced_anew(self, urgent: bool, *asked: Any) -> Future[Any]:
        trace = self._start_tracing()
        return trace(*asked) if urgent else trace(_behind_others, *asked)

    def _start_tracing(self) -> Callable[..., Future[Any]]:
        with self._lock:
            if self._trace is None:
                self._trace = self._undo.enter_context(processes(_PRELOAD))
                self._checked = self._trace(_behind_others, _check_method, self._cache)
            return self._trace


def _behind_others(work: Callable[..., Any], *arguments: Any) -> Any:
    os.nice(_LESS_URGENT)
    return work(*arguments)


def _check_method(cache: bool | str) -> None:
    from torchtune_adaptive.recipe import check_method

    check_method(cache)
