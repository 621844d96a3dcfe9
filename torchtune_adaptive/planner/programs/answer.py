"""Answers about a program: its steps of any size follow from those of two numbers of rows. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner import step_table
from torchtune_adaptive.planner.memory.peak import DeviceLimits, peak
from torchtune_adaptive.planner.programs.request import About, Devices, Program, ProgramPlan
from torchtune_adaptive.planner.speed.speed import Pace
from torchtune_adaptive.planner.traced_run import Answer, Question, StepsOfAnySize, TracedRun

_ANY_LENGTH = 1
"""Length that stands for rows as long as the program makes them."""
_TOKENS = 4096
"""Tokens with a label from which on each more takes as much memory: some losses divide them into so many."""

_TOLERANCE = 0.01
"""The share of the memory that may be left free beside the largest batch, where each size takes a run."""


class StepsOfProgram(StepsOfAnySize, Protocol):
    """The steps of a program, and what else its runs have shown."""

    @property
    def ranks(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def about(self) -> About: ...
    @property
    def has(self) -> Collection[int]:
        """The sizes whose steps take no run."""
        ...

    def unchecked(self, beyond: int) -> str:
        """What is said where the largest size cannot be run; empty if it has to be."""
        ...


class NotRun(Exception):
    """A run of the program that would be needed, where only remembered ones are wanted."""


class ProgramAnswers:
    """The answers about a program."""

    def __init__(self, program: Program, steps: StepsOfProgram) -> None:
        self._program, self._steps = program, steps
        self._seen = steps.about.seen
        if self._seen is None:
            for option, value in (("--rows", program.rows), ("--max-length", program.length)):
                if value is not None:
                    raise NoPrediction(
                        f"{option}: {value}, but no DataLoader makes the batches of {program.name}. "
                        "Leave it out, and set the size in the program or by its arguments."
                    )

    def plan(self, devices: Devices) -> ProgramPlan:
        """What the steps take on devices, and how fast they are."""
        steps, given = self._steps, self._devices(devices)
        unchecked = ""
        if self._seen is None:
            answers = [self._of_its_batch(device, pace) for device, pace in given]
        else:
            asked = [self._question(device, pace) for device, pace in given]
            try:
                answers = [self._answer(one) for one in asked]
            except NotRun:
                unchecked = steps.unchecked(self._sizes[1])
                if not unchecked:
                    raise
                asked = [replace(one, confirmed=False) for one in asked]
                answers = [self._answer(one) for one in asked]
        return ProgramPlan(answers, steps.ranks, steps.micro_batches, steps.about, unchecked)

    @property
    def irregular(self) -> bool:
        """Whether sizes do not follow from others."""
        return self._seen is not None and self._traced.direct

    def table(self, devices: Devices, rows: tuple[int, ...] | None = None) -> step_table.StepTable:
        """What many sizes take on devices, of which the first is the one that is asked about.

        Raises:
            NoPrediction: no other sizes are planned.
        """
        if self._seen is None:
            raise NoPrediction(
                f"--html: no DataLoader makes the batches of {self._program.name}, so no other sizes are "
                "planned. Leave it out."
            )
        given = self._devices(devices)
        # Fewer rows than follow from others take a run each.
        few = self._sizes[0] > TracedRun.ROWS[0]
        return step_table.table_of(self._traced, self._question(*given[0]), given, rows, few)

    def _devices(self, devices: Devices) -> list[tuple[DeviceLimits, Pace | None]]:
        """The devices, with the error that predictions for these steps have."""
        quantized, holders = self._steps.about.quantized, self._steps.about.holders
        facts: dict[str, Any] = {"quantized": quantized, "holders": holders}
        return [
            (one.fragmented if quantized else one, pace and replace(pace, **facts))
            for one, pace in devices(self._steps.ranks)
        ]

    @cached_property
    def _traced(self) -> TracedRun:
        return TracedRun(
            self._steps, _ANY_LENGTH, rows=self._sizes, searches=False, tolerance=_TOLERANCE
        )

    @property
    def _unit(self) -> int:
        """The rows that a batch is a multiple of."""
        assert self._seen is not None
        return self._seen.unit

    @property
    def _own(self) -> int:
        """The units that are run in any case.

        Raises:
            NoPrediction: the rows are no multiple of one.
        """
        assert self._seen is not None
        rows = self._program.rows or self._seen.rows
        if rows % self._unit:
            raise NoPrediction(
                f"--rows: {rows}, but {self._program.name} needs multiples of {self._unit}. Use one."
            )
        return rows // self._unit

    @property
    def _sizes(self) -> tuple[int, int]:
        """The two numbers of units from which others follow."""
        assert self._seen is not None
        tokens = max(self._seen.tokens, self._steps.about.generated) - 1
        filling = -(-_TOKENS * self._seen.shared // (tokens * self._unit)) if tokens > 0 else 1
        known = self._steps.has
        pairs = (size for size in sorted(known) if size >= filling and size + 1 in known)
        least = next(pairs, max(TracedRun.ROWS[0], self._own, filling))
        return least, least + 1

    def _question(self, device: DeviceLimits, pace: Pace | None) -> Question:
        assert self._seen is not None
        return Question(
            device,
            self._own,
            _ANY_LENGTH,
            micro_batches=self._steps.micro_batches,
            pace=pace,
            ceiling=max(1, self._program.ceiling // self._unit),
            confirmed=True,
            tokens=self._seen.tokens * self._unit,
        )

    def _answer(self, asked: Question) -> Answer:
        """The answer in rows."""
        found, unit = self._traced.answer(asked), self._unit
        peak = replace(found.peak, rows=found.peak.rows * unit)
        return replace(found, peak=peak, largest=found.largest * unit)

    def _of_its_batch(self, device: DeviceLimits, pace: Pace | None) -> Answer:
        """The answer where batches are as the program makes them."""
        steps = self._steps
        step = steps.step(1, _ANY_LENGTH)
        found = peak(steps.start_up(_ANY_LENGTH).without_search(step), step, 1, _ANY_LENGTH, device)
        speed = None
        if pace is not None and step.operations is not None:
            pace = replace(pace, dtype=pace.dtype or step.operations.dtype)
            if pace.speeds.peak(pace.dtype) is not None:
                speed = pace.speed(step.operations, 1, 1, steps.micro_batches)
        return Answer(device, found, 0, speed, found.verdict(device))
