"""The peaks of a config's steps at any size, computed from as few traces as possible.

Traces do not depend on the device's memory or on the batch size of the config, and are cached: a query about
the same model on another device needs no tracing.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any, Protocol

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.cache import Cache, cache_folder, libraries, package_fingerprint
from torchtune_adaptive.errors import NoPrediction
from torchtune_adaptive.memory_model.peak import (
    DeviceLimits,
    Held,
    Peak,
    StartUp,
    held,
    largest,
    peak,
    timeline,
)
from torchtune_adaptive.memory_model.steps import (
    Bilinear,
    NotRegular,
    RecordedStep,
    packed_up,
    unpacked,
)
from torchtune_adaptive.settings.fingerprint import step_facts
from torchtune_adaptive.settings.kinds import FROZEN_MODELS, MORE_BLOCKS, is_packed
from torchtune_adaptive.settings.knobs import Choice, configured_choice
from torchtune_adaptive.time_model.operations import DifferentOperations, StepOperations, at_rows

ROWS_TRACED = (2, 3)
"""Not 1: with one row torch takes different code paths."""
_MOST_KEPT = 100
_PARTS = ("model", "loss", "optimizer", *sorted(FROZEN_MODELS | MORE_BLOCKS))
_VERSIONED = ("torch.", "torchtune.", "torchao.")


class NotRemembered(NoPrediction):
    """A step that would have to be traced, where only remembered ones are wanted."""


class Steps(Protocol):
    """Steps of one run on one rank."""

    def start_up(self, length: int) -> StartUp: ...

    def step(self, rows: int, length: int) -> RecordedStep: ...


class Traces:
    """Steps of one config on one rank, each traced once.

    Args:
        cfg: the config, of either recipe.
        ranks: how many there are.
        rank: which of them is traced.
        cache: the run's setting: where traces are kept.
        may_trace: whether to trace what is not remembered; if not, it raises ``NotRemembered``.
    """

    def __init__(
        self, cfg: DictConfig, ranks: int, rank: int, cache: bool | str, may_trace: bool = True
    ) -> None:
        self._run = (cfg, ranks, rank)
        self._may_trace = may_trace
        self._own = configured_choice(cfg, ranks)
        components = (OmegaConf.select(cfg, f"{part}._component_") for part in _PARTS)
        if not all(str(name or "torch.").startswith(_VERSIONED) for name in components):
            cache = False  # no version says when the user's own code changes
        self._kept: Cache[dict[str, Any]] = Cache(
            cache_folder(cache, "traces"), "traces", _are_traces, most=_MOST_KEPT
        )
        facts = step_facts(cfg)
        facts["gradient_accumulation_steps"] = min(cfg.gradient_accumulation_steps, 2)
        self._facts = {
            "config": facts,
            "packed": is_packed(cfg),
            "device": cfg.device,
            "rank": [rank, ranks],
            "libraries": libraries(),
            "code": package_fingerprint(),
        }
        self._tracer: Any = None
        kept = self._kept.get(self._facts) or {}
        self.uneven: bool | None = kept.get("uneven")
        self.max_seq_len: int | None = kept.get("max_seq_len")
        """The longest rows that the model takes, if it bounds them; known once something is traced."""
        self._steps = {name: unpacked(step) for name, step in kept.get("steps", {}).items()}
        self._grown = False

    def start_up(self, length: int) -> StartUp:
        """Set-up and first step; the step has as many tokens as one row of this length, as in a search."""
        size = (ROWS_TRACED[0], max(1, length // ROWS_TRACED[0]))
        name = f"first {size}"
        if name not in self._steps:
            self._begin(size)
        return StartUp(self._steps["set-up"], self._steps[name])

    def step(
        self, rows: int, length: int, choice: Choice | None = None, micro_batches: int | None = None
    ) -> RecordedStep:
        """A later step of a size.

        Args:
            rows: in a micro-batch.
            length: of each row.
            choice: other values of knobs that are switches.
            micro_batches: 1 or 2; None is as configured.
        """
        name = f"{(rows, length)}"
        if choice is not None:
            changed = {k: v for k, v in sorted(choice.items()) if v != self._own.get(k)}
            name += f" {changed}" if changed else ""
        if micro_batches not in (None, min(2, self._run[0].gradient_accumulation_steps)):
            name += f" x {micro_batches}"
        if name not in self._steps:
            if self._tracer is None:
                self._begin((ROWS_TRACED[0], max(1, length // ROWS_TRACED[0])))
            self._note(name, self._tracer.take_step(rows, length, choice, micro_batches))
        return self._steps[name]

    def remember(self) -> None:
        """Keep new traces in the cache."""
        if self._grown:
            steps = {name: packed_up(step) for name, step in self._steps.items()}
            about = {"uneven": self.uneven, "max_seq_len": self.max_seq_len}
            self._kept.put(self._facts, {**about, "steps": steps})
            self._grown = False

    def _begin(self, size: tuple[int, int]) -> None:
        if not self._may_trace:
            raise NotRemembered("not remembered")
        from torchtune_adaptive.trace.tracer import Tracer

        self._tracer = Tracer(*self._run)
        self.uneven = self._tracer.uneven
        self.max_seq_len = self._tracer.max_seq_len
        self._note("set-up", self._tracer.set_up)
        self._note(f"first {size}", self._tracer.take_step(*size))

    def _note(self, name: str, step: RecordedStep) -> None:
        self._steps[name] = step
        self._grown = True


def _are_traces(value: Any) -> bool:
    try:
        for step in value["steps"].values():
            unpacked(step)
        return True
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return False


class TracedRun:
    """Peaks of one config.

    Args:
        traces: the traces of the config.
        length: the row length of most queries.
        any_length: whether there will be queries with other lengths.
    """

    def __init__(self, traces: Steps, length: int, any_length: bool = False) -> None:
        self._traces = traces
        self._beginning = traces.start_up(length)
        self._structures: dict[int, Bilinear] = {}
        self._every: Bilinear | None = None
        self._known: dict[tuple[int, int, DeviceLimits, bool], Held] = {}
        self.direct = False
        """Whether steps are not bilinear, so that each size is traced separately."""
        try:
            if any_length:
                self._every = self._of_every_length(length)
            self._structure(length)
        except NotRegular:
            self.direct = True

    @property
    def any_length(self) -> bool:
        """Whether steps of every length follow from the traces."""
        return self._every is not None and not self.direct

    def largest(self, length: int, device: DeviceLimits, ceiling: int | None = None) -> int:
        """The largest micro-batch that fits, and is no larger than a ceiling."""
        most = ceiling or sys.maxsize

        def reserved(rows: int) -> int:
            return self._held(rows, length, device).reserved

        few, many = ROWS_TRACED[0], 4 * ROWS_TRACED[0]
        low, high = reserved(few), reserved(many)
        each = max(1, (high - low) // (many - few))
        guess = min(most, many + (device.usable_bytes - high) // each)
        if guess > many:  # memory is only piecewise linear: correct the slope at the far end
            end = reserved(guess)
            guess -= (end - device.usable_bytes) * (guess - many) // max(1, end - high)
        return largest(lambda rows: rows <= most and reserved(rows) <= device.usable_bytes, guess)

    def confirmed_largest(
        self, length: int, device: DeviceLimits, ceiling: int | None = None
    ) -> int:
        """The same, verified by a trace of that very size."""
        found = self.largest(length, device, ceiling)
        if found < ROWS_TRACED[0] or self.direct:
            return found
        traced = self._traces.step(found, length).renumbered()
        self.direct = traced.events != self._structure(length).step(found, length).events
        return self.largest(length, device, ceiling) if self.direct else found

    def peak(self, rows: int, length: int, device: DeviceLimits) -> Peak:
        known = self._held(rows, length, device)
        return peak(self._beginning, self._step(rows, length), rows, length, device, known)

    def _held(self, rows: int, length: int, device: DeviceLimits) -> Held:
        """Each size is replayed once: that takes a tenth of a second."""
        size = (rows, length, device, self.direct)
        if size not in self._known:
            self._known[size] = held(self._beginning, self._step(rows, length), device)
        return self._known[size]

    def operations(self, rows: int, length: int) -> StepOperations:
        """What a step computes and moves."""
        if not self.direct and rows >= ROWS_TRACED[0]:
            few, many = (self._noted(traced, length) for traced in ROWS_TRACED)
            share = (rows - ROWS_TRACED[0]) / (ROWS_TRACED[1] - ROWS_TRACED[0])
            with suppress(DifferentOperations):
                return at_rows(few, many, share)
        return self._noted(rows, length)

    def _noted(self, rows: int, length: int) -> StepOperations:
        operations = self._traces.step(rows, length).operations
        assert operations is not None  # all but first steps have them
        return operations

    def timeline(
        self, rows: int, length: int, device: DeviceLimits
    ) -> list[tuple[str, dict[str, int]]]:
        return timeline(self._beginning, self._step(rows, length), device)

    def _step(self, rows: int, length: int) -> RecordedStep:
        if self.direct or rows < ROWS_TRACED[0]:
            return self._traces.step(rows, length)
        return self._structure(length).step(rows, length)

    def _structure(self, length: int) -> Bilinear:
        if length not in self._structures:
            self._structures[length] = self._every or self._of_lengths(length)
        return self._structures[length]

    def _of_lengths(self, *lengths: int) -> Bilinear:
        return Bilinear({(r, n): self._traces.step(r, n) for r in ROWS_TRACED for n in lengths})

    def _of_every_length(self, length: int) -> Bilinear | None:
        """Steps of any length, if a third length matches the prediction from two; else None, and each length
        needs its own traces: attention that keeps its weights, for example, is quadratic in the length."""
        if length < 8:
            return None
        every = self._of_lengths(length // 2, length)
        few, third = ROWS_TRACED[0], length // 4
        traced = self._traces.step(few, third).renumbered()
        return every if every.step(few, third).events == traced.events else None
