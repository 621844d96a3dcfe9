"""Plans a program: from what is remembered of it, or in a process of its own, in which it runs. No torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torchtune_adaptive.planner.programs.answer import NotRun, ProgramAnswers
from torchtune_adaptive.planner.programs.kept import Kept, KeptSteps, keep, kept_of
from torchtune_adaptive.planner.programs.request import Devices, Program, ProgramPlan
from torchtune_adaptive.planner.step_table import StepTable
from torchtune_adaptive.planner.workers import call_alone

T = TypeVar("T")


def plan_program(program: Program, devices: Devices, timeout: float) -> ProgramPlan:
    """Plan a program on devices that are like its GPU; if it has to run, for at most so many seconds.

    Raises:
        NoPrediction: it cannot be run on a device that is not there, or not in that time.
    """
    return _answer(program, partial(_plan, devices), timeout)


def remembered_plan(program: Program, devices: Devices) -> ProgramPlan | None:
    """The plan, if it follows from what is remembered."""
    return _remembered(program, kept_of(program), partial(_plan, devices))


def tabulate_program(
    program: Program, devices: Devices, rows: tuple[int, ...] | None, timeout: float
) -> StepTable:
    """What many sizes take on devices, of which the first is asked about; otherwise as ``plan_program``."""
    return _answer(program, partial(_tabulate, devices, rows), timeout)


def _plan(devices: Devices, answers: ProgramAnswers) -> ProgramPlan:
    return answers.plan(devices)


def _tabulate(devices: Devices, rows: tuple[int, ...] | None, answers: ProgramAnswers) -> StepTable:
    return answers.table(devices, rows)


def _answer(program: Program, ask: Callable[[ProgramAnswers], T], timeout: float) -> T:
    kept = kept_of(program)
    found = _remembered(program, kept, ask)
    if found is None:
        found, kept = call_alone(_run, program, kept, ask, timeout=timeout)
        keep(program, kept)
    return found


def _remembered(program: Program, kept: Kept, ask: Callable[[ProgramAnswers], T]) -> T | None:
    try:
        return ask(ProgramAnswers(program, KeptSteps(kept)))
    except NotRun:
        return None


def _run(program: Program, kept: Kept, ask: Callable[[ProgramAnswers], T]) -> tuple[T, Kept]:
    from torchtune_adaptive.planner.programs.plan import answered

    return answered(program, kept, ask)
