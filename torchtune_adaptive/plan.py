"""What fits, told ahead: on any machine, without a GPU, weights, tokenizer or data.

A few steps are traced (see ``trace``), and what the caching allocator would do with them is worked out for
every number of rows (see ``forecast``). Each config is traced in a process of its own, which registers an
imagined device and ends; the process that asks stays as it is.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config import BLOCK, AdaptiveSettings, check
from torchtune_adaptive.errors import AdaptiveBatchingError, NoPrediction
from torchtune_adaptive.forecast import (
    Beginning,
    Bilinear,
    Device,
    NotRegular,
    Peak,
    Step,
    largest,
    peak,
    timeline,
)
from torchtune_adaptive.gpus import DEFAULT, GIB, Gpu, gpu

ROWS_TRACED = (2, 3)
"""Not 1: with one row torch takes other ways through some operations."""

ASSUMED_LENGTH = 2048
ERROR_BAND = 0.03
"""Of predictions for a real device, as a share of the peak."""


@dataclass(frozen=True)
class Question:
    """What is asked of one config."""

    cfg: dict[str, Any]
    ranks: int
    device: Device
    rows: int
    """The micro-batch that the config has."""
    length: int
    other_lengths: tuple[int, ...] = ()
    in_detail: bool = False
    """Whether to make the curve and the timeline, too."""
    confirmed: bool = False
    """Whether to trace the answer itself, so that nothing rests on the way it was found."""


@dataclass(frozen=True)
class Answer:
    """What is predicted for one config."""

    rows: int
    length: int
    ranks: int
    largest: int
    """The largest micro-batch that fits; 0 if none does."""
    configured: Peak
    at_largest: Peak | None
    lengths: dict[int, tuple[int, int]]
    """Of other row lengths: the largest micro-batch, and its peak."""
    curve: list[tuple[int, int, int]]
    """Rows, allocated, reserved."""
    timeline: list[tuple[str, dict[str, int]]]
    traced_directly: bool
    """Whether steps were not bilinear, so that each size was traced by itself."""
    seconds: float
    tool_bytes: int
    """The most memory that the process took which made the prediction."""


def answer(question: Question) -> Answer:
    """Trace and predict. Call it in a process that does nothing else: see ``trace``."""
    from torchtune_adaptive.trace import Tracer

    started = time.perf_counter()
    logging.disable(logging.WARNING)
    run = _Traced(Tracer(OmegaConf.create(question.cfg), question.ranks), question)
    found = run.largest(question.length)
    worked_out = found >= ROWS_TRACED[0] and not run.direct
    if question.confirmed and worked_out and not run.holds_at(found, question.length):
        run.direct = True
        found = run.largest(question.length)
    curve = []
    if question.in_detail:
        most = max(found * 5 // 4, question.rows, 8)
        sizes = sorted({question.rows, found or 1, *(max(2, most * n // 8) for n in range(9))})
        curve = [
            (r, p.allocated, p.reserved) for r in sizes for p in [run.peak(r, question.length)]
        ]
    lengths = {}
    for length in question.other_lengths:
        rows = run.largest(length)
        lengths[length] = (rows, run.peak(max(rows, 1), length).reserved)
    return Answer(
        rows=question.rows,
        length=question.length,
        ranks=question.ranks,
        largest=found,
        configured=run.peak(question.rows, question.length),
        at_largest=run.peak(found, question.length) if found else None,
        lengths=lengths,
        curve=curve,
        timeline=run.timeline(question.rows, question.length) if question.in_detail else [],
        traced_directly=run.direct,
        seconds=time.perf_counter() - started,
        tool_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


class _Traced:
    """Peaks of one config, out of as few traces as will do."""

    def __init__(self, tracer: Any, question: Question) -> None:
        self._tracer = tracer
        self._device = question.device
        self._traces: dict[tuple[int, int], Step] = {}
        self._peaks: dict[tuple[int, int, bool], Peak] = {}
        self.direct = False
        lengths = [question.length]
        if question.other_lengths:
            lengths.append(question.length // 2)
        self._beginning = Beginning(tracer.set_up, tracer.take_step(ROWS_TRACED[0], lengths[-1]))
        self._on_streams = tracer.stream_categories()
        try:
            corners = {(r, n): self._trace(r, n) for r in ROWS_TRACED for n in lengths}
            self._bilinear = {question.length: Bilinear(corners)}
            if question.other_lengths:
                self._add_lengths(question)
        except NotRegular:
            self.direct = True

    def _add_lengths(self, question: Question) -> None:
        """Where a third length is what the first two say, so is any other; else each needs its traces:
        attention that keeps its weights, for one, is quadratic in the length."""
        every = self._bilinear[question.length]
        few, third = ROWS_TRACED[0], max(2, question.length // 4)
        holds = every.step(few, third).events == self._trace(few, third).renumbered().events
        for length in question.other_lengths:
            if holds:
                self._bilinear[length] = every
            else:
                corners = {(rows, length): self._trace(rows, length) for rows in ROWS_TRACED}
                self._bilinear[length] = Bilinear(corners)

    def peak(self, rows: int, length: int) -> Peak:
        key = (rows, length, self.direct)
        if key not in self._peaks:
            step = self._step(rows, length)
            self._peaks[key] = peak(self._beginning, step, rows, length, self._device)
        return self._peaks[key]

    def largest(self, length: int) -> int:
        """The largest micro-batch that fits."""
        few, many = ROWS_TRACED[0], 4 * ROWS_TRACED[0]
        low, high = self.peak(few, length).reserved, self.peak(many, length).reserved
        each = max(1, (high - low) // (many - few))
        guess = many + (self._device.usable - high) // each
        if guess > many:  # nearer the end the line is another one
            end = self.peak(guess, length).reserved
            guess -= (end - self._device.usable) * (guess - many) // max(1, end - high)
        return largest(lambda rows: self.fits(rows, length), guess)

    def fits(self, rows: int, length: int) -> bool:
        return self.peak(rows, length).reserved <= self._device.usable

    def holds_at(self, rows: int, length: int) -> bool:
        """Whether a trace of this size is what was worked out for it."""
        traced = self._trace(rows, length).renumbered()
        return traced.events == self._bilinear[length].step(rows, length).events

    def timeline(self, rows: int, length: int) -> list[tuple[str, dict[str, int]]]:
        return timeline(self._beginning, self._step(rows, length), self._device)

    def _step(self, rows: int, length: int) -> Step:
        if self.direct or rows < ROWS_TRACED[0]:
            return self._trace(rows, length)
        return self._bilinear[length].step(rows, length)

    def _trace(self, rows: int, length: int) -> Step:
        if (rows, length) not in self._traces:
            step = self._tracer.take_step(rows, length)
            for block, _, stream in step.events:
                if category := self._on_streams.get(stream):
                    label = step.labels[block]
                    step.labels[block] = label._replace(category=category)
            self._traces[rows, length] = step
        return self._traces[rows, length]


# --- from a config to questions -----------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What was asked for, and what was assumed on the way."""

    cfg: DictConfig
    ranks: int
    device: Device
    length: int
    length_source: str
    assumptions: tuple[str, ...] = field(default=())

    def question(self, **changes: Any) -> Question:
        plain = OmegaConf.to_container(self.cfg, resolve=True)
        assert isinstance(plain, dict)
        return replace(
            Question(
                {str(key): value for key, value in plain.items()},
                self.ranks,
                self.device,
                self.cfg.batch_size,
                self.length,
            ),
            **changes,
        )


def make_plan(
    cfg: DictConfig, ranks: int, gpu_name: str | None = None, memory: int | None = None
) -> Plan:
    """Settle what the prediction is for.

    Raises:
        ConfigError: the config cannot work.
        NoPrediction: its memory cannot be told ahead.
    """
    settings = check(cfg, "lora" if "lora_attn_modules" in cfg.model else "full")
    for key, off, reason in _CANNOT_TELL:
        if cfg.get(key, off) not in (off, None):
            raise NoPrediction(
                f"{key}: {cfg[key]!r} {reason}. Set {key}={off} to get a prediction."
            )
    length, source = _row_length(cfg, settings)
    device, assumed = _device(cfg, settings, ranks, gpu_name, memory)
    return Plan(cfg, ranks, device, length, source, (*assumed, *_caveats(cfg)))


_CANNOT_TELL = (
    ("tensor_parallel_dim", 1, "splits tensors in ways that are not traced yet"),
    (
        "fsdp_cpu_offload",
        False,
        "moves parameters between host and device, which is not traced yet",
    ),
)


def _row_length(cfg: DictConfig, settings: AdaptiveSettings) -> tuple[int, str]:
    if settings.probe_length is not None:
        return settings.probe_length, f"{BLOCK}.probe_length"
    for block in ("dataset", "tokenizer"):
        node = cfg.get(block)
        if isinstance(node, DictConfig) and (length := node.get("max_seq_len")):
            return int(length), f"{block}.max_seq_len"
    longest = cfg.model.get("max_seq_len") or ASSUMED_LENGTH
    return min(ASSUMED_LENGTH, longest), "assumed: set tokenizer.max_seq_len"


def _device(
    cfg: DictConfig,
    settings: AdaptiveSettings,
    ranks: int,
    gpu_name: str | None,
    memory: int | None,
) -> tuple[Device, tuple[str, ...]]:
    memory = memory or settings.memory_limit
    share = 1 - settings.headroom
    if cfg.device == "cpu":
        if memory is None:
            raise NoPrediction(
                "device: 'cpu' has no memory of its own to plan for. Give --memory (or "
                f"{BLOCK}.memory_limit) to plan for a simulated device, or device=cuda."
            )
        return Device("simulated device", int(memory * share), caching=False, band=0.001), ()
    variables = (os.environ.get(f"PYTORCH{x}_ALLOC_CONF", "") for x in ("", "_CUDA"))
    expandable = any("expandable_segments:true" in value.lower() for value in variables)
    kind = gpu(gpu_name or DEFAULT)
    usable = memory or kind.usable(ranks)
    name = f"{kind.name}" if memory is None else f"{memory / GIB:.4g} GiB"
    device = Device(
        name, int(usable * share), True, expandable, (kind.workspace, kind.workspace), ERROR_BAND
    )
    assumed = [
        f"usable: {usable / GIB:.2f} GiB, of which {settings.headroom:.0%} stay free (headroom)",
        f"allocator: {'expandable segments' if expandable else 'default segments'}",
        f"cuBLAS workspaces: 2 x {kind.workspace / 2**20:.4g} MiB",
    ]
    if memory is None:
        assumed.insert(0, _taken_before(kind, usable))
    return device, tuple(assumed)


def _taken_before(kind: Gpu, usable: int) -> str:
    others = kind.gib - usable / GIB
    return f"{kind.name}: {kind.gib:.2f} GiB, less {others:.2f} GiB for CUDA's context and NCCL"


def _caveats(cfg: DictConfig) -> Iterator[str]:
    """What is predicted in another way than it runs, and in which direction that errs."""
    if cfg.get("compile", False):
        yield (
            "compile: predicted as it runs without; compiled steps usually take less (errs high), "
            "compiling itself may take more for a moment"
        )
    if cfg.get("dataset", {}).get("packed", False):
        yield "packed rows: flex attention is counted as flash attention (errs high)"
    if cfg.device != "cpu":
        yield "attention: flash; where torch picks cuDNN, its workspace comes on top (errs low)"


@contextmanager
def processes(at_once: int | None = None) -> Iterator[Callable[[Question], Future[Answer]]]:
    """Ask questions, each in a process of its own that sees no GPU."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchtune_adaptive.trace"])
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in hidden}
    os.environ.update(hidden)
    pool = ProcessPoolExecutor(at_once or os.cpu_count(), context, max_tasks_per_child=1)
    try:
        yield lambda question: pool.submit(_answer_or_reason, question)
    finally:
        pool.shutdown(cancel_futures=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _answer_or_reason(question: Question) -> Answer:
    try:
        return answer(question)
    except AdaptiveBatchingError:
        raise
    except Exception as error:  # whose class the asking process may not have
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise NoPrediction(f"A step of this config could not be traced: {reason}") from None
