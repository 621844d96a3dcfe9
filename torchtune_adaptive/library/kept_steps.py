"""The traced steps of a question, kept for later.

They do not depend on the GPU, on how much memory it has, or on the rows that are asked for. So another such
question about the same step is answered without a trace, and without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchtune_adaptive.common import Cache, cache_folder
from torchtune_adaptive.library.step_choices import EVEN
from torchtune_adaptive.library.step_questions import ANY_LENGTH, StepQuestion
from torchtune_adaptive.planner import Answer, Question, RecordedStep, StartUp, TracedRun

if TYPE_CHECKING:
    from torchtune_adaptive.library.model_steps import ModelTracer, StepsOfModel

_MOST_KEPT = 100
TRAINED = "step"
"""The name of steps among phases."""


class NotTraced(Exception):
    """A step that would have to be traced, where only remembered ones are wanted."""


class KeptSteps:
    """The steps of one question with one ``routing`` of experts: those that are remembered, and others as
    they are traced. Where it may not trace, what is not remembered raises ``NotTraced``."""

    compiled = False
    """Whether memory is that of compiled code; it is not, whatever is compiled."""
    max_seq_len = None

    def __init__(self, question: StepQuestion, routing: str = EVEN, may_trace: bool = True) -> None:
        self._question, self._routing, self._may_trace = question, routing, may_trace
        folder = None if question.facts is None else cache_folder(question.cache, "traces")
        self._kept: Cache[dict[str, Any]] = Cache(folder, "traces", _are_kept, most=_MOST_KEPT)
        self._facts = {**(question.facts or {}), "routing": routing}
        kept = self._kept.get(self._facts) or {}
        self._about: dict[str, Any] = kept.get("about", {})
        self._steps = {
            name: RecordedStep.unpacked(one) for name, one in kept.get("steps", {}).items()
        }
        self._tracer: StepsOfModel | None = None
        self._grown = False

    def start_up(self, length: int) -> StartUp:
        if "set-up" not in self._steps:
            start_up = self._traced.start_up
            self._note("set-up", start_up.set_up)
            self._note("first", start_up.first_step)
        return StartUp(self._steps["set-up"], self._steps["first"])

    def step(self, rows: int, length: int) -> RecordedStep:
        name = _name(TRAINED, rows)
        if name not in self._steps:
            self._note(name, self._traced.step(rows))
        return self._steps[name]

    noted = step

    def of_phase(
        self, phase: str, rows: int, take: Callable[[ModelTracer], RecordedStep]
    ) -> RecordedStep:
        """What is done with so many rows between two steps, as a tracer takes it."""
        name = _name(phase, rows)
        if name not in self._steps:
            self._note(name, self._traced.of_phase(phase, rows, take))
        return self._steps[name]

    def number(self, name: str, of: Callable[[ModelTracer], int]) -> int:
        """A number that is linear in the number of layers."""
        return int(self._fact(name, lambda: self._traced.number(of)))

    def known(self) -> dict[tuple[int, int], RecordedStep]:
        return {}  # all rows are as long

    def known_first(self) -> dict[tuple[int, int], StartUp]:
        return {}

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return bool(self._fact("has_experts", lambda: self._traced.has_experts))

    @property
    def routing_matters(self) -> bool:
        """Whether another routing may take other memory."""
        return bool(self._fact("routing_matters", lambda: self._traced.routing_matters))

    @property
    def as_written(self) -> str:
        return str(self._fact("as_written", lambda: self._traced.as_written))

    def checked(self, phase: str, beyond: int) -> Sequence[int]:
        """The sizes ``beyond`` the two from which others follow, by which that was checked; none where a
        check has failed."""
        if phase in self._about.get("irregular", ()):
            return ()
        sizes = (_rows(name, phase) for name in self._steps)
        return sorted(size for size in sizes if size is not None and size > beyond)

    def note_irregular(self, phase: str) -> None:
        """Remember that sizes do not follow from others."""
        known = self._about.setdefault("irregular", [])
        if phase not in known:
            known.append(phase)
            self._grown = True

    def remember(self) -> None:
        """Keep new traces in the cache."""
        if self._grown:
            for name in ("has_experts", "routing_matters", "as_written"):
                getattr(self, name)
            steps = {name: step.packed() for name, step in self._steps.items()}
            self._kept.put(self._facts, {"about": self._about, "steps": steps})
            self._grown = False

    @property
    def _traced(self) -> StepsOfModel:
        if self._tracer is None:
            if not self._may_trace:
                raise NotTraced
            from torchtune_adaptive.library.model_steps import StepsOfModel
            from torchtune_adaptive.planner import check_sums

            if self._question.asked.device.caching:
                check_sums()
            self._tracer = StepsOfModel(self._question, self._routing)
        return self._tracer

    def _fact(self, name: str, found: Callable[[], Any]) -> Any:
        if name not in self._about:
            self._about[name] = found()
            self._grown = True
        return self._about[name]

    def _note(self, name: str, step: RecordedStep) -> None:
        # Without a pace nobody asks what it computes.
        self._steps[name] = step if self._question.asked.pace else step._replace(operations=None)
        self._grown = True


def answer_of(run: TracedRun, asked: Question, steps: KeptSteps, beyond: int) -> tuple[Answer, str]:
    """The answer about a step, and what to say where its largest size was not traced itself. Sizes
    ``beyond`` some number of rows check that others follow from two."""
    try:
        answer = run.answer(asked)
    except NotTraced:
        if not (checked := steps.checked(TRAINED, beyond)):
            raise
        return run.answer(replace(asked, confirmed=False)), _unchecked(checked)
    if run.direct:
        steps.note_irregular(TRAINED)
    return answer, ""


def largest_of(
    run: TracedRun, asked: Question, steps: KeptSteps, phase: str, beyond: int
) -> tuple[int, str]:
    """The largest size of a phase that fits; otherwise as ``answer_of``."""

    def largest(confirmed: bool) -> int:
        return run.largest(ANY_LENGTH, asked.device, asked.ceiling, confirmed)

    try:
        found = largest(asked.confirmed)
    except NotTraced:
        if not (checked := steps.checked(phase, beyond)):
            raise
        return largest(confirmed=False), _unchecked(checked)
    if run.direct:
        steps.note_irregular(phase)
    return found, ""


def _unchecked(sizes: Sequence[int]) -> str:
    return (
        "largest: computed from remembered traces, which were checked at "
        f"{', '.join(map(str, sizes))} rows, and not traced itself"
    )


def _name(phase: str, rows: int) -> str:
    return f"{phase}: {rows}"


def _rows(name: str, phase: str) -> int | None:
    """The rows of a step, by its name; None if it is not of that phase."""
    before, _, rows = name.rpartition(": ")
    return int(rows) if before == phase else None


def _are_kept(value: Any) -> bool:
    try:
        for step in value["steps"].values():
            RecordedStep.unpacked(step)
        return isinstance(value["about"], Mapping)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return False
