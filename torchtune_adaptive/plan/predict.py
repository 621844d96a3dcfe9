"""What is asked about one config, and what is told: each in a process of its own.

A few steps are traced (see ``trace``), and what the caching allocator would do with them is worked out for
every number of rows (see ``forecast``). The process that traces registers an imagined device and ends; the
one that asks stays as it is.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any, TypeVar

from omegaconf import OmegaConf

from torchtune_adaptive.errors import AdaptiveBatchingError, NoPrediction
from torchtune_adaptive.memory_model.peak import DeviceLimits, Peak
from torchtune_adaptive.trace.traces import TracedRun, Traces

_PROCESSES = 4
"""At once: each takes up to half a gigabyte."""
T = TypeVar("T")


@dataclass(frozen=True)
class Query:
    """What is asked of one config."""

    cfg: dict[str, Any]
    ranks: int
    device: DeviceLimits
    rows: int
    """The micro-batch that the config has."""
    length: int
    rank: int = 0
    cache: bool | str = False
    """Where traces are remembered."""
    other_lengths: tuple[int, ...] = ()
    in_detail: bool = False
    """Whether to make the curve and the timeline, too."""
    confirmed: bool = False
    """Whether to trace the answer itself, so that nothing rests on the way it was found."""


@dataclass(frozen=True)
class Prediction:
    """What is predicted for one config."""

    rows: int
    length: int
    ranks: int
    rank: int
    largest: int
    """The largest micro-batch that fits; 0 if none does."""
    configured: Peak
    at_largest: Peak | None
    lengths: dict[int, int]
    """Of other row lengths: the largest micro-batch."""
    curve: list[tuple[int, int, int]]
    """Rows, allocated, reserved."""
    timeline: list[tuple[str, dict[str, int]]]
    traced_directly: bool
    """Whether steps were not bilinear, so that each size was traced by itself."""
    uneven: bool
    """Whether ranks hold different shares of the parameters."""
    seconds: float
    tool_bytes: int
    """The most memory that the process took which made the prediction."""


def predict(question: Query) -> Prediction:
    """Trace and predict. Call it in a process that does nothing else: see ``trace``."""
    started = time.perf_counter()
    cfg, length, device = OmegaConf.create(question.cfg), question.length, question.device
    traces = Traces(cfg, question.ranks, question.rank, question.cache)
    run = TracedRun(traces, length, any_length=bool(question.other_lengths))
    find = run.confirmed_largest if question.confirmed else run.largest
    found = find(length, device)
    curve = []
    if question.in_detail:
        most = max(found * 5 // 4, question.rows, 8)
        sizes = sorted({question.rows, found or 1, *(max(2, most * n // 8) for n in range(9))})
        curve = [(r, p.allocated, p.reserved) for r in sizes for p in [run.peak(r, length, device)]]
    lengths = {other: run.largest(other, device) for other in question.other_lengths}
    told = Prediction(
        rows=question.rows,
        length=length,
        ranks=question.ranks,
        rank=question.rank,
        largest=found,
        configured=run.peak(question.rows, length, device),
        at_largest=run.peak(found, length, device) if found else None,
        lengths=lengths,
        curve=curve,
        timeline=run.timeline(question.rows, length, device) if question.in_detail else [],
        traced_directly=run.direct,
        uneven=bool(traces.uneven),
        seconds=time.perf_counter() - started,
        tool_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    traces.remember()
    return told


def be_quiet() -> None:
    """What torch and torchtune say about a run is not about a prediction."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def in_own_process(work: Callable[..., T], *arguments: Any) -> T:
    """Run it with nothing but our own errors coming out: others may have classes that only it knows."""
    be_quiet()
    try:
        return work(*arguments)
    except AdaptiveBatchingError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise NoPrediction(f"A step of this config could not be traced: {reason}") from None


def warm_up() -> None:
    """Start the process that all others come from; it imports torch, sees no GPU, and takes its time."""
    multiprocessing.set_forkserver_preload(["torchtune_adaptive.trace.self_check"])
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in hidden}
    os.environ.update(hidden)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def processes() -> Iterator[Callable[..., Future[Any]]]:
    """Call functions, each in a process of its own that sees no GPU."""
    warm_up()
    context = multiprocessing.get_context("forkserver")
    at_once = min(os.cpu_count() or 1, _PROCESSES)
    pool = ProcessPoolExecutor(at_once, context, max_tasks_per_child=1)
    try:
        yield lambda work, *arguments: pool.submit(in_own_process, work, *arguments)
    finally:
        pool.shutdown(cancel_futures=True)
