"""A prediction for a run that is about to search: made beside its set-up, in a process that sees no GPU.

The process traces while the run loads its model; when the run knows how long its rows are and how much
memory there is, it asks. Whatever goes wrong, the search goes on without, and says so.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.device.memory import Usage
from torchtune_adaptive.plan.calibration import Calibration, Calibrations
from torchtune_adaptive.settings.adaptive import AdaptiveSettings
from torchtune_adaptive.settings.checks import check
from torchtune_adaptive.settings.kinds import kind_of

log = logging.getLogger(__name__)

PATIENCE = 120.0
"""Seconds that an answer may take."""
PROGRAM = "import sys; from torchtune_adaptive.plan.background import serve; serve(*sys.argv[1:])"

# Of a launched process; a prediction is no rank of the run, and must not look like one.
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class PredictedPeak:
    """What a number of rows should take."""

    rows: int
    reserved: int
    allocated: int


class BackgroundPlanner:
    """What ``tune-adaptive plan`` would say about a run.

    Args:
        cfg: the config of the run.
        settings: how it searches.
        ranks: how many there are.
        device: what the device calls itself.
    """

    def __init__(
        self, cfg: DictConfig, settings: AdaptiveSettings, ranks: int, device: str
    ) -> None:
        self._about: dict[str, Any] = {}
        self._gave_up: _NoAnswer | None = None
        self._said: int | None = None
        self._device = device
        self._calibrations = Calibrations(settings.cache, cfg, ranks)
        self._learned = self._calibrations.of(device)
        steps = 2 if settings.keep_global_batch or settings.grow_past_memory else 1
        self._accumulation = max(cfg.gradient_accumulation_steps, steps)
        asked = OmegaConf.merge(cfg, {"gradient_accumulation_steps": self._accumulation})
        self._folder = tempfile.TemporaryDirectory()
        config = Path(self._folder.name) / "config.yaml"
        config.write_text(OmegaConf.to_yaml(asked, resolve=True))
        self._complaints = Path(self._folder.name) / "complaints.txt"
        environment = {k: v for k, v in os.environ.items() if k not in _LAUNCHED}
        with self._complaints.open("w") as complaints:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(config), str(ranks)],
                env={**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
            )
        self._lines = _lines_of(self._process.stdout)

    @classmethod
    def begin(
        cls, cfg: DictConfig, settings: AdaptiveSettings, ranks: int, device: str
    ) -> BackgroundPlanner | None:
        """Begin one, or say why not."""
        try:
            return cls(cfg, settings, ranks, device)
        except OSError as error:
            log.info(f"No prediction: {error}. Searching without it.")
            return None

    def largest(self, row_length: int, capacity: int) -> int | None:
        """The largest micro-batch that should fit; None if there is no answer.

        Args:
            row_length: of the rows that are tried.
            capacity: bytes that a rank can get.
        """
        self._about = {"row_length": row_length, "capacity": capacity}
        try:
            rows = self._ask(correction=self._learned.reserved if self._learned else 1.0).rows
        except _NoAnswer as reason:
            log.info(f"No prediction: {reason} Searching without it.")
            return None
        if rows != self._said:
            log.info(f"The largest micro-batch is predicted to be {rows} rows.")
        self._said = rows
        return rows

    def learn_from(self, rows: int, measured: Usage, accumulation: int) -> None:
        """Correct what is predicted from now on, also in later runs, by what a size that fits took.

        Args:
            rows: the size.
            measured: the largest peaks of all ranks.
            accumulation: micro-batches in the step that was measured.
        """
        if (accumulation > 1) != (self._accumulation > 1):
            return  # what was predicted is another step, with gradients of an earlier micro-batch
        try:
            predicted = self._ask(rows=rows)
        except _NoAnswer:
            return  # as has been said
        self._learned = Calibration(
            device=self._device,
            capacity=self._about["capacity"],
            reserved=measured.peak_bytes / predicted.reserved,
            allocated=measured.peak_allocated_bytes / predicted.allocated,
            when=time.time(),
        )
        log.info(
            f"The peak of {rows} rows was {self._learned.reserved - 1:+.2%} off what was predicted "
            f"(reserved; allocated: {self._learned.allocated - 1:+.2%})."
        )
        self._calibrations.keep(self._learned)

    def close(self) -> None:
        """Give it up, if it is still at it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):  # what it was last asked did not reach it
                stream.close()
        self._folder.cleanup()

    def _ask(self, **request: Any) -> PredictedPeak:
        if self._gave_up is None:
            try:
                return self._answer({**self._about, **request})
            except _NoAnswer as reason:
                self._gave_up = reason  # for good: a late answer would be to another question
        raise self._gave_up

    def _answer(self, request: dict[str, Any]) -> PredictedPeak:
        assert self._process.stdin is not None
        line = ""
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=PATIENCE)
        except queue.Empty:
            raise _NoAnswer(f"it took more than {PATIENCE:g} s.") from None
        except OSError:
            pass  # it has ended
        if not line:
            said = self._complaints.read_text().strip().splitlines()
            raise _NoAnswer(said[-1] if said else "it said nothing.")
        try:
            return PredictedPeak(**json.loads(line))
        except (ValueError, TypeError):
            raise _NoAnswer(f"it said {line!r}.") from None


class _NoAnswer(Exception):
    """Why there is none."""


def _lines_of(
    stream: IO[str] | None, at_end: Callable[[], None] = lambda: None
) -> queue.SimpleQueue[str]:
    """Lines as they come, and at the end an empty one."""
    assert stream is not None
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        with suppress(ValueError):  # closed
            for line in stream:
                lines.put(line)
        at_end()
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    return lines


def serve(config: str, ranks: str) -> None:
    """Trace, then answer, until the run that asks is over, however it ends."""
    from torchtune_adaptive.plan.predict import be_quiet
    from torchtune_adaptive.plan.request import device_for, row_length
    from torchtune_adaptive.trace.self_check import check_method
    from torchtune_adaptive.trace.traces import TracedRun, Traces

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    be_quiet()
    requests = _lines_of(sys.stdin, at_end=lambda: os._exit(0))
    cfg = OmegaConf.load(config)
    assert isinstance(cfg, DictConfig)
    settings = check(cfg, kind_of(cfg))
    check_method(settings.cache)
    traces = Traces(cfg, int(ranks), 0, settings.cache)
    run = TracedRun(traces, row_length(cfg, settings)[0], any_length=True)
    traces.remember()
    while True:
        request = json.loads(requests.get())
        length = request["row_length"]
        device, _ = device_for(cfg, settings, int(ranks), memory=request["capacity"])
        rows = request.get("rows")
        if rows is None:
            corrected = replace(device, correction=request["correction"])
            rows = run.confirmed_largest(length, corrected)
        peak = run.peak(max(rows, 1), length, device)
        foretold = {"rows": rows, "reserved": peak.reserved, "allocated": peak.allocated}
        print(json.dumps(foretold), file=answers, flush=True)
        traces.remember()
