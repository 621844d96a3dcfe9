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
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.calibration import Calibration, Calibrations
from torchtune_adaptive.config import BLOCK, AdaptiveSettings, check
from torchtune_adaptive.errors import AdaptiveBatchingError, ConfigError, NoPrediction
from torchtune_adaptive.forecast import Device, Peak
from torchtune_adaptive.gpus import DEFAULT, GIB, Gpu, gpu
from torchtune_adaptive.traced_run import TracedRun, Traces

ASSUMED_LENGTH = 2048
ERROR_BAND = 0.03
"""Of predictions for a real device, as a share of the peak."""

HERE = "here"
"""In place of a device's name: the one of this machine, as searches found it."""

_PROCESSES = 4
"""At once: each takes up to half a gigabyte."""

T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """What is asked of one config."""

    cfg: dict[str, Any]
    ranks: int
    device: Device
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
class Answer:
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


def answer(question: Question) -> Answer:
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
    told = Answer(
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


# --- from a config to questions -----------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What was asked for, and what was assumed on the way."""

    cfg: DictConfig
    ranks: int
    device: Device
    length: int
    length_source: str
    cache: bool | str
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
                cache=self.cache,
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
    if (ways := cfg.get("tensor_parallel_dim") or 1) > 1:
        raise NoPrediction(
            f"tensor_parallel_dim: {ways} splits tensors in ways that are not traced yet. "
            "Set tensor_parallel_dim=1 to get a prediction."
        )
    length, source = row_length(cfg, settings)
    device, assumed = device_for(cfg, settings, ranks, gpu_name, memory)
    return Plan(cfg, ranks, device, length, source, settings.cache, (*assumed, *_caveats(cfg)))


def row_length(cfg: DictConfig, settings: AdaptiveSettings) -> tuple[int, str]:
    if settings.probe_length is not None:
        return settings.probe_length, f"{BLOCK}.probe_length"
    for block in ("dataset", "tokenizer"):
        node = cfg.get(block)
        if isinstance(node, DictConfig) and (length := node.get("max_seq_len")):
            return int(length), f"{block}.max_seq_len"
    longest = cfg.model.get("max_seq_len") or ASSUMED_LENGTH
    return min(ASSUMED_LENGTH, longest), "assumed: set tokenizer.max_seq_len"


def device_for(
    cfg: DictConfig,
    settings: AdaptiveSettings,
    ranks: int,
    gpu_name: str | None = None,
    memory: int | None = None,
) -> tuple[Device, tuple[str, ...]]:
    """What a run will have to do with, and what was assumed about it.

    Args:
        cfg: of the run.
        settings: of the run.
        ranks: how many there are.
        gpu_name: a known kind of device, or what was measured on this machine.
        memory: what a process can get, if that is known.
    """
    memory = memory or settings.memory_limit
    share = 1 - settings.headroom
    if cfg.device == "cpu":
        if memory is None:
            raise NoPrediction(
                "device: 'cpu' has no memory of its own to plan for. Give --memory (or "
                f"{BLOCK}.memory_limit) to plan for a simulated device, or device=cuda."
            )
        return Device("simulated device", int(memory * share), caching=False, band=0.001), ()
    measured = _measured_here(settings, ranks) if gpu_name == HERE else None
    kind = gpu(gpu_name or DEFAULT) if measured is None else gpu(DEFAULT)
    if measured is not None:
        usable, name = min(memory or measured.capacity, measured.capacity), measured.device
    elif memory is not None:
        usable, name = memory, f"{memory / GIB:.4g} GiB"
    else:
        usable, name = kind.usable(ranks), kind.name
    variables = (os.environ.get(f"PYTORCH{x}_ALLOC_CONF", "") for x in ("", "_CUDA"))
    expandable = any("expandable_segments:true" in value.lower() for value in variables)
    device = Device(
        name=name,
        usable=int(usable * share),
        expandable=expandable,
        workspaces=(kind.workspace, kind.workspace),
        band=ERROR_BAND,
        correction=measured.reserved if measured is not None else 1.0,
    )
    assumed = [
        f"usable: {usable / GIB:.2f} GiB, of which {settings.headroom:.0%} stay free (headroom)",
        f"allocator: {'expandable segments' if expandable else 'default segments'}",
        f"cuBLAS workspaces: 2 x {kind.workspace / 2**20:.4g} MiB",
    ]
    if measured is not None:
        assumed.insert(0, measured.text())
    elif memory is None:
        assumed.insert(0, _taken_before(kind, usable))
    return device, tuple(assumed)


def _measured_here(settings: AdaptiveSettings, ranks: int) -> Calibration:
    newest = Calibrations(settings.cache).newest(ranks)
    if newest is None:
        raise ConfigError(
            "--gpu",
            HERE,
            "is the device of this machine as a search with as many ranks (one, or more) found it, "
            "and none is remembered",
            f"Run one with {BLOCK}.search=predict, or name a device (--list-gpus)",
        )
    return newest


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
    if cfg.get("fsdp_cpu_offload", False):
        yield "CPU offload: what the host needs is not predicted"
    if cfg.get("dataset", {}).get("packed", False):
        yield "packed rows: flex attention is counted as flash attention (errs high)"
    if cfg.device != "cpu":
        yield "attention: flash; where torch picks cuDNN, its workspace comes on top (errs low)"


def in_process_of_its_own(work: Callable[..., T], *arguments: Any) -> T:
    """Run it with nothing but our own errors coming out: others may have classes that only it knows."""
    be_quiet()
    try:
        return work(*arguments)
    except AdaptiveBatchingError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise NoPrediction(f"A step of this config could not be traced: {reason}") from None


@contextmanager
def processes() -> Iterator[Callable[..., Future[Any]]]:
    """Call functions, each in a process of its own that sees no GPU."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchtune_adaptive.self_check"])
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in hidden}
    os.environ.update(hidden)
    at_once = min(os.cpu_count() or 1, _PROCESSES)
    pool = ProcessPoolExecutor(at_once, context, max_tasks_per_child=1)
    try:
        yield lambda work, *arguments: pool.submit(in_process_of_its_own, work, *arguments)
    finally:
        pool.shutdown(cancel_futures=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
