"""Runs a program for its steps: those of all layers, and any number of rows, from runs with few layers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import TypeVar

from torchtune_adaptive.common import counted
from torchtune_adaptive.planner.memory.peak import StartUp
from torchtune_adaptive.planner.memory.recorded_step import RecordedStep
from torchtune_adaptive.planner.programs.answer import ProgramAnswers
from torchtune_adaptive.planner.programs.kept import KeptSteps, Remembered
from torchtune_adaptive.planner.programs.request import About, Program
from torchtune_adaptive.planner.programs.run import ProgramFailed, ProgramRun, Ran
from torchtune_adaptive.planner.programs.steps import WANTED
from torchtune_adaptive.planner.trace.alike_layers import Shortening
from torchtune_adaptive.planner.trace.any_depth import AnyDepth
from torchtune_adaptive.planner.trace.compiled_regions import CompiledRegions

T = TypeVar("T")


def answered(
    program: Program, kept: Remembered, ask: Callable[[ProgramAnswers], T]
) -> tuple[T, Remembered]:
    """Ask about a program in this process, which does nothing else; the answer, and what it follows from."""
    return ProgramRun(program).answered(lambda run: _answer(run, kept, ask))


def _answer(
    run: ProgramRun, kept: Remembered, ask: Callable[[ProgramAnswers], T]
) -> tuple[T, Remembered]:
    try:
        steps = RunSteps(run)
        alike = run.alike() if steps.shortened else None
        found = _asked(run, KeptSteps(kept, steps), ask)
        if alike is None or alike():
            return found
    except ProgramFailed:  # of a layer, perhaps, that was left out
        pass
    return _asked(run, KeptSteps(Remembered(), RunSteps(run, whole=True)), ask)


def _asked(
    run: ProgramRun, steps: KeptSteps, ask: Callable[[ProgramAnswers], T]
) -> tuple[T, Remembered]:
    answers = ProgramAnswers(run.program, steps)
    found = ask(answers)
    return found, steps.kept(run.read(), answers.irregular)


class RunSteps:
    """The steps of a program, each run when it is asked for."""

    compiled = False
    max_seq_len = None
    as_written = ""

    def __init__(self, run: ProgramRun, whole: bool = False) -> None:
        self._run = run
        self._rows = run.program.rows  # of the first run
        self._period = None if whole else 1
        self._shortened: list[_Shortened] = []
        self.wanted = WANTED
        """The steps that runs have from now on."""
        self._runs: dict[tuple[int | None, int, int, int], Callable[[], Ran]] = {}
        self._tracer: AnyDepth[_Shortened] = AnyDepth(
            self._made, lambda tracer: tracer.first, self._period
        )
        self._start_up = self._tracer.start_up()
        self.ranks = run.ranks()

    @property
    def shortened(self) -> bool:
        """Whether few layers stand for all."""
        return any(made.shortening.removed for made in self._shortened)

    @property
    def about(self) -> About:
        return self._tracer.any.ran.about

    @property
    def has(self) -> Collection[int]:
        return ()

    def unchecked(self, beyond: int) -> str:
        return ""  # all sizes can be run

    @property
    def micro_batches(self) -> int:
        operations = self._tracer.any.ran.step.operations
        return len(operations.micro_batches) if operations else 1

    def start_up(self, length: int) -> StartUp:
        return self._start_up

    def step(self, rows: int, length: int) -> RecordedStep:
        seen = self.about.seen
        rows *= seen.unit if seen else 1
        own = seen is None or rows == (self._rows or seen.rows)
        asked = self._rows if own else rows
        return self._tracer.step(
            lambda tracer: tracer.step(asked), self._period, counted(rows, "row")
        )

    noted = step

    def known(self) -> dict[tuple[int, int], RecordedStep]:
        return {}  # all rows are as long

    def known_first(self) -> dict[tuple[int, int], StartUp]:
        return {}

    def _made(self, shortening: Shortening) -> _Shortened:
        """A model with fewer layers."""
        if shortening.least > 1:  # another one will be wanted
            self.start(self._rows, Shortening(shortening.kept + 1, shortening.period))
        made = _Shortened(self, shortening, self._rows)
        self._shortened.append(made)
        return made

    def start(self, rows: int | None, shortening: Shortening) -> Callable[[], Ran]:
        """Begin a run, if it has not begun; gives what waits for its result."""
        key = rows, shortening.kept, shortening.period, shortening.least
        if key not in self._runs:
            self._runs[key] = cache(self._run.start(rows, shortening, self.wanted))
        found = self._runs[key]

        def result() -> Ran:
            ran = found()
            vars(shortening).update(vars(ran.shortening))
            return ran

        return result

    def result(self, rows: int | None, shortening: Shortening) -> Ran:
        """A run of the program, beside which those of other models begin that are asked for next."""
        wanted = self.start(rows, shortening)
        for other in self._shortened:
            if abs(other.shortening.kept - shortening.kept) == 1:
                self.start(rows, other.shortening)
        return wanted()


class _Shortened:
    """The program with models that have fewer layers."""

    regions: CompiledRegions | None = None
    needs_all_layers = ""

    def __init__(self, steps: RunSteps, shortening: Shortening, rows: int | None) -> None:
        self._steps, self.shortening = steps, shortening
        self.ran = steps.result(rows, shortening)
        steps.wanted = self.ran.enough
        self.set_up, self.first = self.ran.start_up.set_up, self.ran.start_up.first_step

    def step(self, rows: int | None) -> RecordedStep:
        return self._steps.result(rows, self.shortening).step

    def compile_with(self, other: object, /) -> None:
        """Nothing is compiled."""
