"""Predict the memory of a training step and of what is done without gradients between two steps.

Such *phases* are generating rows and scoring them. Each may have another holder of memory beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torchtune_adaptive.library.experts import EVEN
from torchtune_adaptive.library.planning import ANY_LENGTH, StepQuestion, StepsOfModel
from torchtune_adaptive.planner import Peak, RecordedStep, StartUp, TracedRun, check_sums

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


def answer_phases(
    question: StepQuestion,
    phases: Sequence[PhaseQuestion],
    training: PhaseQuestion,
    weights: Callable[[nn.Module], int],
) -> PhasesAnswer:
    """Trace and predict, in a process that does nothing else.

    Args:
        question: about the step.
        phases: about what precedes it.
        training: about the phase that the step is.
        weights: function that counts the numbers in the weights of a model.
    """
    if question.asked.device.caching:
        check_sums()
    steps = StepsOfModel(question, EVEN)
    found = [_peak(question, StepsOfPhase(steps, phase), phase) for phase in phases]
    found.append(_peak(question, steps, training))
    count = steps.number(lambda tracer: weights(tracer.step.model))
    return PhasesAnswer(tuple(found), count, steps.as_written, steps.has_experts)


class StepsOfPhase:
    """The work of one phase, each size traced once."""

    compiled = False
    as_written = ""
    max_seq_len = None

    def __init__(self, steps: StepsOfModel, phase: PhaseQuestion) -> None:
        self._steps, self._phase = steps, phase
        self._known: dict[int, RecordedStep] = {}

    def start_up(self, length: int) -> StartUp:
        return self._steps.start_up(length)

    def step(self, rows: int, length: int) -> RecordedStep:
        if rows not in self._known:
            phase = self._phase
            self._known[rows] = self._steps.of_phase(
                lambda tracer: tracer.take_phase(phase.work, phase.worst_case(rows))
            )
        return self._known[rows]

    noted = step

    def known(self) -> dict[tuple[int, int], RecordedStep]:
        return {}  # all rows are as long

    def known_first(self) -> dict[tuple[int, int], StartUp]:
        return {}


def _peak(
    question: StepQuestion,
    traces: StepsOfModel | StepsOfPhase,
    phase: PhaseQuestion,
) -> PhasePeak:
    asked = question.asked
    device = replace(asked.device, usable_bytes=asked.device.usable_bytes - phase.beside)
    run = TracedRun(traces, ANY_LENGTH, rows=(phase.least, phase.least + 1))
    ceiling = asked.ceiling or 1
    rows = asked.rows or 1
    peak = run.peak(rows * (phase.times or 1), ANY_LENGTH, device)
    if phase.times:
        most = run.largest(ANY_LENGTH, device, ceiling * phase.times, asked.confirmed)
        largest = most // phase.times
    else:
        largest = ceiling if peak.reserved <= device.usable_bytes else 0
    return PhasePeak(phase.name, peak.rows if phase.times else 0, peak, phase.beside, largest)
