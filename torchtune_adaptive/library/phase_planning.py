"""Predict the memory of a training step and of what is done without gradients between two steps.

Such *phases* are generating rows and scoring them. Each may have another holder of memory beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchtune_adaptive.common import arguments
from torchtune_adaptive.library.kept_steps import TRAINED, KeptSteps, NotTraced, largest_of
from torchtune_adaptive.library.step_choices import EVEN
from torchtune_adaptive.library.step_questions import ANY_LENGTH, StepQuestion
from torchtune_adaptive.planner import Peak, RecordedStep, StartUp, TracedRun, call_alone

if TYPE_CHECKING:
    from torch import nn

Label = Callable[[str], None]
"""Says what is allocated next."""


@dataclass(frozen=True)
class PhaseQuestion:
    """What is done without gradients between two steps."""

    name: str
    work: Callable[[nn.Module, Any, Label], Any]
    """Does it, given the model and a batch on the device."""
    worst_case: Callable[[int], Any]
    """Makes a batch of so many rows on the host, each as long as it may be."""
    times: int = 1
    """How many times the rows of a micro-batch of training are taken at once; 0 if there are no rows."""
    beside: int = 0
    """Bytes that another holder of memory takes meanwhile."""
    least: int = 2
    """The rows of a batch from which on each more takes as much memory as the one before."""


@dataclass(frozen=True)
class PhasesQuestion:
    """A question about a step and what precedes it."""

    step: StepQuestion
    phases: Sequence[PhaseQuestion]
    """About what precedes it."""
    training: PhaseQuestion
    """About the phase that the step is."""
    weights: Callable[[nn.Module], int]
    """Counts the numbers in the weights of a model."""


@dataclass(frozen=True)
class PhasePeak:
    """The most memory that a phase takes."""

    name: str
    rows: int
    """The rows that are taken at once."""
    peak: Peak
    beside: int
    largest: int
    """The largest micro-batch of training with which the phase fits; 0 if it never does."""


@dataclass(frozen=True)
class PhasesAnswer:
    """The answer for all phases, of which training is the last."""

    phases: tuple[PhasePeak, ...]
    weights: int
    """The numbers in the weights of the model that is trained."""
    as_written: str
    has_experts: bool
    """Whether the model is a mixture of experts."""
    unchecked: str = ""
    """What is said where the largest size follows from what is remembered, and was not traced itself."""


def phases_answered(question: PhasesQuestion, timeout: float) -> PhasesAnswer:
    """The answer: from remembered steps, or from a process that may take so many seconds."""
    arguments.seconds("timeout", timeout)
    found = remembered_phases(question)
    return found or call_alone(_answer_phases, question, timeout=timeout)


def remembered_phases(question: PhasesQuestion) -> PhasesAnswer | None:
    """The answer, if it takes no trace. It needs no torch."""
    try:
        return _answer_phases(question, may_trace=False)
    except NotTraced:
        return None


def _answer_phases(question: PhasesQuestion, may_trace: bool = True) -> PhasesAnswer:
    """Predict; where something is traced, in a process that does nothing else."""
    steps = KeptSteps(question.step, EVEN, may_trace)
    answers = [
        _peak(question.step, steps, StepsOfPhase(steps, phase), phase) for phase in question.phases
    ]
    answers.append(_peak(question.step, steps, steps, question.training))
    weights = question.weights
    count = steps.number("weights", lambda tracer: weights(tracer.step.model))
    steps.remember()
    found, said = zip(*answers, strict=True)
    unchecked = next(filter(None, said), "")
    return PhasesAnswer(found, count, steps.as_written, steps.has_experts, unchecked)


class StepsOfPhase:
    """The work of one phase, each size traced once."""

    compiled = False
    as_written = ""
    max_seq_len = None

    def __init__(self, steps: KeptSteps, phase: PhaseQuestion) -> None:
        self._steps, self._phase = steps, phase

    def start_up(self, length: int) -> StartUp:
        return self._steps.start_up(length)

    def step(self, rows: int, length: int) -> RecordedStep:
        phase = self._phase
        return self._steps.of_phase(
            phase.name,
            rows,
            lambda tracer: tracer.take_phase(phase.work, phase.worst_case(rows)),
        )

    noted = step

    def known(self) -> dict[tuple[int, int], RecordedStep]:
        return {}  # all rows are as long

    def known_first(self) -> dict[tuple[int, int], StartUp]:
        return {}


def _peak(
    of_step: StepQuestion,
    steps: KeptSteps,
    traces: KeptSteps | StepsOfPhase,
    phase: PhaseQuestion,
) -> tuple[PhasePeak, str]:
    """The answer about a phase, and what to say of it."""
    asked = of_step.asked
    device = replace(asked.device, usable_bytes=asked.device.usable_bytes - phase.beside)
    run = TracedRun(traces, ANY_LENGTH, rows=(phase.least, phase.least + 1))
    ceiling = asked.ceiling or 1
    rows = asked.rows or 1
    peak = run.peak(rows * (phase.times or 1), ANY_LENGTH, device)
    said = ""
    if phase.times:
        name = TRAINED if traces is steps else phase.name
        question = replace(asked, device=device, ceiling=ceiling * phase.times)
        most, said = largest_of(run, question, steps, name, phase.least + 1)
        largest = most // phase.times
    else:
        largest = ceiling if peak.reserved <= device.usable_bytes else 0
    rows = peak.rows if phase.times else 0
    return PhasePeak(phase.name, rows, peak, phase.beside, largest), said
