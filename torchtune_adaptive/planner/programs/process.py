"""Plans a program: from what is remembered of it, or in a process of its own, in which it runs. No torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner.programs.answer import NotRun, ProgramAnswers
from torchtune_adaptive.planner.programs.kept import KeptSteps, Remembered, keep, kept_of
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


def tabulate(
    call: Callable[..., Future[Any]],
    program: Program,
    devices: Devices,
    rows: tuple[int, ...] | None,
) -> Future[Any]:
    """Find what many sizes take on devices, of which the first is asked about: in a process by ``call`` of
    ``processes``, unless it is remembered. ``table_of`` gives the table."""
    kept, ask = kept_of(program), partial(_tabulate, devices, rows)
    found: Future[Any] = Future()
    try:
        known = _remembered(program, kept, ask)
    except NoPrediction as error:
        found.set_exception(error)
        return found
    if known is not None:
        found.set_result((known, kept))
        return found
    running = call(_run, program, kept, ask)
    running.add_done_callback(partial(_keep_result, program))
    return running


def _keep_result(program: Program, done: Future[Any]) -> None:
    if not done.cancelled() and done.exception() is None:
        keep(program, done.result()[1])


def table_of(found: Future[Any]) -> StepTable:
    """The table that ``tabulate`` finds."""
    table, _ = found.result()
    assert isinstance(table, StepTable)
    return table


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


def _remembered(program: Program, kept: Remembered, ask: Callable[[ProgramAnswers], T]) -> T | None:
    try:
        return ask(ProgramAnswers(program, KeptSteps(kept)))
    except NotRun:
        return None


def _run(
    program: Program, kept: Remembered, ask: Callable[[ProgramAnswers], T]
) -> tuple[T, Remembered]:
    from torchtune_adaptive.planner.programs.plan import answered

    return answered(program, kept, ask)
