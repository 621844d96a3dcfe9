"""The traced steps of a config, kept for later.

Traces do not depend on the device's memory or on the batch size of the config, and are cached: a query about
the same model on another device needs no tracing.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any

from omegaconf import OmegaConf

from torchtune_adaptive.common import (
    Cache,
    NoPrediction,
    cache_folder,
    counted,
    libraries,
    package_fingerprint,
)
from torchtune_adaptive.core import Choice, knobs
from torchtune_adaptive.planner import RecordedStep, StartUp, TracedRun
from torchtune_adaptive.recipe.settings.asked import ACCUMULATION, Asked
from torchtune_adaptive.recipe.settings.fingerprint import step_facts
from torchtune_adaptive.recipe.settings.keys import KEYS
from torchtune_adaptive.recipe.settings.knob_table import configured_choice
from torchtune_adaptive.recipe.settings.phase_names import SCORING
from torchtune_adaptive.recipe.settings.rules import COMPONENT

Size = tuple[int, int]
"""The rows of a micro-batch, and their length."""
_MOST_KEPT = 100
_PARTS = tuple(key for key, row in KEYS.items() if row.rule is COMPONENT and row.memory)
"""The components that a step is made of."""
_VERSIONED = ("torch.", "torchtune.", "torchao.", "torchtune_adaptive.")


class PassedCheck:
    """The result of the self-check with the installed versions, if it passed. It needs no torch."""

    def __init__(self, cache: bool | str) -> None:
        self._kept: Cache[bool] = Cache(
            cache_folder(cache, "self_checks"), "self-check", lambda value: value is True
        )
        self._facts = {"libraries": libraries(), "code": package_fingerprint()}

    def is_known(self) -> bool:
        return self._kept.get(self._facts) is True

    def remember(self) -> None:
        self._kept.put(self._facts, True)


class NotRemembered(NoPrediction):
    """A step that would have to be traced, where only remembered ones are wanted."""


class Traces:
    """The steps of one config on one rank, each traced once. Where it may not trace, what is not remembered
    raises ``NotRemembered``. Where it may do so ``beside``, a second process may do a part of it. GPUs older
    than Ampere (``before_ampere``) have steps of their own."""

    def __init__(
        self,
        asked: Asked,
        ranks: int,
        rank: int,
        may_trace: bool = True,
        beside: bool = False,
        before_ampere: bool = False,
    ) -> None:
        self._run, self._before_ampere = (asked, ranks, rank), before_ampere
        self._may_trace, self._beside = may_trace, beside
        self._own = configured_choice(asked, ranks)
        components = (OmegaConf.select(asked.cfg, f"{part}._component_") for part in _PARTS)
        versioned = all(str(name or "torch.").startswith(_VERSIONED) for name in components)
        # No version says when the user's own code changes.
        cache = asked.settings.cache if versioned else False
        self._kept: Cache[dict[str, Any]] = Cache(
            cache_folder(cache, "traces"), "traces", _are_traces, most=_MOST_KEPT
        )
        facts = step_facts(asked.resolved().cfg)
        self._micro_batches = facts[ACCUMULATION] = min(asked.accumulation, 2)
        text = json.dumps(facts, sort_keys=True, default=str)
        self._facts = {
            # A digest, as another process has values of the environment in the place of references.
            "config": hashlib.sha256(text.encode()).hexdigest(),
            "packed": asked.packed(),
            "device": [asked["device"], before_ampere],
            "rank": [rank, ranks],
            "libraries": libraries(),
            "code": package_fingerprint(),
        }
        self._tracer: Any = None
        self.compiled = asked.compiled_for_gpu
        kept = self._kept.get(self._facts) or {}
        self.uneven: bool | None = kept.get("uneven")
        self.as_written: str = kept.get("as_written", "")
        """The reason why something that is compiled was traced as it is written; empty if nothing was."""
        self.max_seq_len: int | None = kept.get("max_seq_len")
        """Longest rows that the model takes, if it bounds them; known once something is traced."""
        self.layers: int = kept.get("layers", 0)
        """Number of the model's layers that can be checkpointed; known once something is traced."""
        self._steps = {
            name: RecordedStep.unpacked(step) for name, step in kept.get("steps", {}).items()
        }
        self._grown = False

    def start_up(self, length: int) -> StartUp:
        """Set-up and first step; the step has as many tokens as one row of this length, as in a search."""
        size = TracedRun.first_size(length)
        name = f"first {size}"
        if name not in self._steps:
            self._begin(size)
        return StartUp(self._steps["set-up"], self._steps[name])

    def step(
        self, rows: int, length: int, choice: Choice | None = None, micro_batches: int | None = None
    ) -> RecordedStep:
        """A later step of a size: see ``Tracer.take_step``."""
        return self._traced("", rows, length, choice, micro_batches)

    def noted(
        self, rows: int, length: int, choice: Choice | None = None, micro_batches: int | None = None
    ) -> RecordedStep:
        """Such a step with its operations: as it is written, since compiled kernels say nothing of them."""
        how = "as written " if self.compiled else ""
        return self._traced(how, rows, length, choice, micro_batches)

    def known(self) -> dict[Size, RecordedStep]:
        """Later steps of the config's own choice that take no trace."""
        return {size: step for name, step in self._steps.items() if (size := _size(name))}

    def known_first(self) -> dict[Size, StartUp]:
        """First steps that take no trace, with what precedes them."""
        first = ((name.partition("first "), step) for name, step in self._steps.items())
        return {
            size: StartUp(self._steps["set-up"], step)
            for (before, _, rest), step in first
            if not before and (size := _size(rest))
        }

    def of_phase(
        self, phase: str, rows: int, length: int, as_written: bool = False
    ) -> RecordedStep:
        """A micro-batch of a phase of a rollout: see ``Tracer.take_phase``."""
        name = f"{phase} {'as written ' * as_written}{(rows, length)}"
        if name not in self._steps:
            step = self._ready(length).step(
                methodcaller("take_phase", phase, rows, length, as_written),
                where=f"{phase} of {counted(rows, 'row')}",
            )
            self._note(name, step)
        return self._steps[name]

    def _traced(
        self, how: str, rows: int, length: int, choice: Choice | None, micro_batches: int | None
    ) -> RecordedStep:
        name = f"{how}{(rows, length)}"
        if choice is not None:
            changed = {k: v for k, v in sorted(choice.items()) if v != self._own.get(k)}
            name += f" {changed}" if changed else ""
        if micro_batches not in (None, self._micro_batches):
            name += f" x {micro_batches}"
        if name not in self._steps:
            checkpoint = (self._own | (choice or {}))[knobs.CHECKPOINT]
            step = self._ready(length).step(
                methodcaller("take_step", rows, length, choice, micro_batches, bool(how)),
                knobs.period(checkpoint),
                counted(rows, "row"),
            )
            self._note(name, step)
        return self._steps[name]

    def remember(self) -> None:
        """Keep new traces in the cache."""
        if self._grown:
            steps = {name: step.packed() for name, step in self._steps.items()}
            about = {
                "uneven": self.uneven,
                "max_seq_len": self.max_seq_len,
                "layers": self.layers,
                "as_written": self.as_written,
            }
            self._kept.put(self._facts, {**about, "steps": steps})
            self._grown = False

    def _ready(self, length: int) -> Any:
        if self._tracer is None:
            self._begin(TracedRun.first_size(length))
        return self._tracer

    def _begin(self, size: tuple[int, int]) -> None:
        if not self._may_trace:
            raise NotRemembered("not remembered")
        from torchtune_adaptive.planner import AnyDepth
        from torchtune_adaptive.recipe.tracing.tracer import Tracer

        self._tracer = tracer = AnyDepth(
            lambda shorten: Tracer(*self._run, shorten, self._before_ampere),
            lambda each: each.take_step(*size),
            knobs.period(self._own[knobs.CHECKPOINT]),
            self._beside,
        )
        start_up = tracer.start_up()
        self.uneven = tracer.any.uneven
        self.max_seq_len = tracer.any.max_seq_len
        self.layers = tracer.number(attrgetter("layers"))
        self._note("set-up", start_up.set_up)
        self._note(f"first {size}", start_up.first_step)

    def _note(self, name: str, step: RecordedStep) -> None:
        self._steps[name] = step
        self.as_written = self._tracer.any.as_written
        self._grown = True


@dataclass(frozen=True)
class PartTraces:
    """Traces of a part of a rollout, as those of a run's steps: of a phase without gradients, or of training
    steps with another number of micro-batches than the config's."""

    traces: Traces
    phase: str = ""
    """Name of the phase; empty for training steps."""
    micro_batches: int | None = None
    """Their number, 1 or 2: a step with more takes no more memory than one with two."""
    max_seq_len: int | None = None

    @property
    def compiled(self) -> bool:
        return self.traces.compiled and self.phase in ("", SCORING)

    @property
    def as_written(self) -> str:
        return self.traces.as_written

    def start_up(self, length: int) -> StartUp:
        return self.traces.start_up(length)

    def known(self) -> dict[Size, RecordedStep]:
        return {}  # each is traced

    def known_first(self) -> dict[Size, StartUp]:
        return {}

    def step(self, rows: int, length: int) -> RecordedStep:
        if self.phase:
            return self.traces.of_phase(self.phase, rows, length)
        return self.traces.step(rows, length, None, self.micro_batches)

    def noted(self, rows: int, length: int) -> RecordedStep:
        if self.phase:
            return self.traces.of_phase(self.phase, rows, length, as_written=self.compiled)
        return self.traces.noted(rows, length, None, self.micro_batches)


def _size(name: str) -> Size | None:
    """The size in the name of a step; None if the name says more."""
    found = re.fullmatch(r"\((\d+), (\d+)\)", name)
    return (int(found[1]), int(found[2])) if found else None


def _are_traces(value: Any) -> bool:
    try:
        for step in value["steps"].values():
            RecordedStep.unpacked(step)
        return True
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return False
