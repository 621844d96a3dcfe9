"""Plans a program: its steps of any size follow from runs with few layers and two numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from torchtune_adaptive.common import NoPrediction, counted
from torchtune_adaptive.planner.memory.peak import DeviceLimits, StartUp, peak
from torchtune_adaptive.planner.memory.recorded_step import RecordedStep
from torchtune_adaptive.planner.programs.request import Devices, Program, ProgramPlan, Seen
from torchtune_adaptive.planner.programs.run import ProgramRun, Ran
from torchtune_adaptive.planner.speed.speed import Pace
from torchtune_adaptive.planner.trace.alike_layers import Shortening
from torchtune_adaptive.planner.trace.any_depth import AnyDepth
from torchtune_adaptive.planner.trace.compiled_regions import CompiledRegions
from torchtune_adaptive.planner.traced_run import Answer, Question, TracedRun

_ANY_LENGTH = 1
"""Length that stands for rows as long as the program makes them."""
_TOKENS = 4096
"""Tokens with a label from which on each more takes as much memory: some losses divide them into so many."""
_CEILING = 1 << 14


def planned(program: Program, devices: Devices) -> ProgramPlan:
    """Plan a program in this process, which does nothing else."""
    return ProgramRun(program).answered(lambda run: _answer(run, devices))


def _answer(run: ProgramRun, devices: Devices) -> ProgramPlan:
    ranks = run.ranks()
    given = devices(ranks)
    steps = StepsOfProgram(run)
    alike = run.alike() if steps.shortened else None
    plan = _plan(run, steps, ranks, given)
    if alike is not None and not alike():
        plan = _plan(run, StepsOfProgram(run, whole=True), ranks, given)
    return plan


def _plan(
    run: ProgramRun,
    steps: StepsOfProgram,
    ranks: int,
    given: Sequence[tuple[DeviceLimits, Pace | None]],
) -> ProgramPlan:
    seen = steps.seen
    if seen is None:
        for option, value in (("--rows", run.program.rows), ("--max-length", run.program.length)):
            if value is not None:
                raise NoPrediction(
                    f"{option}: {value}, but no DataLoader makes the batches of {run.program.name}. "
                    "Leave it out, and set the size in the program or by its arguments."
                )
        answers = [_of_its_batch(steps, device, pace) for device, pace in given]
        return steps.plan(answers, ranks)
    rows, unit = run.program.rows or seen.rows, seen.unit  # which is run in any case
    if rows % unit:
        raise NoPrediction(
            f"--rows: {rows}, but {run.program.name} needs multiples of {unit}. Use one."
        )
    own = rows // unit
    tokens = max(seen.tokens, steps.generated) - 1
    filling = -(-_TOKENS * seen.shared // (tokens * unit)) if tokens > 0 else 0
    least = max(TracedRun.ROWS[0], own, filling)
    traced = TracedRun(steps, _ANY_LENGTH, rows=(least, least + 1), searches=False)
    asked = [
        Question(
            device,
            own,
            _ANY_LENGTH,
            micro_batches=steps.micro_batches,
            pace=pace,
            ceiling=_CEILING // unit,
            confirmed=True,
            tokens=seen.tokens * unit,
        )
        for device, pace in given
    ]
    return steps.plan([_in_rows(traced.answer(one), unit) for one in asked], ranks)


def _in_rows(answer: Answer, unit: int) -> Answer:
    """An answer about units of so many rows, in rows."""
    peak = replace(answer.peak, rows=answer.peak.rows * unit)
    return replace(answer, peak=peak, largest=answer.largest * unit)


def _of_its_batch(steps: StepsOfProgram, device: DeviceLimits, pace: Pace | None) -> Answer:
    """The answer where batches are as the program makes them."""
    step = steps.step(1, _ANY_LENGTH)
    found = peak(steps.start_up(_ANY_LENGTH).without_search(step), step, 1, _ANY_LENGTH, device)
    speed = None
    if pace is not None and step.operations is not None:
        pace = replace(pace, dtype=pace.dtype or step.operations.dtype)
        if pace.speeds.peak(pace.dtype) is not None:
            speed = pace.speed(step.operations, 1, 1, steps.micro_batches)
    return Answer(device, found, 0, speed, found.verdict(device))


class StepsOfProgram:
    """The steps of a program, each run when it is asked for."""

    compiled = False
    max_seq_len = None
    as_written = ""

    def __init__(self, run: ProgramRun, whole: bool = False) -> None:
        self._run = run
        self._period = None if whole else 1
        self._shortened: list[_Shortened] = []
        self._runs: dict[tuple[int | None, int, int, int], Callable[[], Ran]] = {}
        self._tracer: AnyDepth[_Shortened] = AnyDepth(
            self._made, lambda tracer: tracer.first, self._period
        )
        self._start_up = self._tracer.start_up()

    @property
    def shortened(self) -> bool:
        """Whether few layers stand for all."""
        return any(made.shortening.removed for made in self._shortened)

    @property
    def seen(self) -> Seen | None:
        return self._tracer.any.ran.seen

    @property
    def generated(self) -> int:
        return self._tracer.any.ran.generated

    def plan(self, answers: Sequence[Answer], ranks: int) -> ProgramPlan:
        """The plan that has these answers."""
        ran, each = self._tracer.any.ran, self.micro_batches
        return ProgramPlan(
            answers, ranks, ran.seen, each, ran.compiles, ran.generated, ran.uncounted
        )

    @property
    def micro_batches(self) -> int:
        operations = self._tracer.any.ran.step.operations
        return len(operations.micro_batches) if operations else 1

    def start_up(self, length: int) -> StartUp:
        return self._start_up

    def step(self, rows: int, length: int) -> RecordedStep:
        rows *= self.seen.unit if self.seen else 1
        asked = None if self.seen is None or rows == self.seen.rows else rows
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
            self.start(None, Shortening(shortening.kept + 1, shortening.period))
        made = _Shortened(self, shortening)
        self._shortened.append(made)
        return made

    def start(self, rows: int | None, shortening: Shortening) -> Callable[[], Ran]:
        """Begin a run, if it has not begun; gives what waits for its result."""
        key = rows, shortening.kept, shortening.period, shortening.least
        if key not in self._runs:
            self._runs[key] = cache(self._run.start(rows, shortening))
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

    def __init__(self, steps: StepsOfProgram, shortening: Shortening) -> None:
        self._steps, self.shortening = steps, shortening
        self.ran = steps.result(None, shortening)
        self.set_up, self.first = self.ran.start_up.set_up, self.ran.start_up.first_step

    def step(self, rows: int | None) -> RecordedStep:
        return self._steps.result(rows, self.shortening).step

    def compile_with(self, other: object, /) -> None:
        """Nothing is compiled."""
