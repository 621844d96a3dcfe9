"""The page of a program: ``--html`` shows other rows, lengths, GPUs and, for a trainer, checkpointing."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torchtune_adaptive.cli.asked_program import AskedProgram
from torchtune_adaptive.cli.page_choices import (
    NOT_FINISHED,
    Page,
    PageChoice,
    names_to_choose,
    not_offered,
    offered_gpus,
    other_numbers_of_gpus,
    words_for_gpu,
    words_for_machine,
)
from torchtune_adaptive.cli.plan_page import write_page
from torchtune_adaptive.cli.plan_progress import TraceProgress
from torchtune_adaptive.common import NoPrediction, counted
from torchtune_adaptive.planner import gpus, processes, programs, step_table, told_of

_PRELOAD = "torchtune_adaptive.planner.programs.run"
_AS_ASKED = "as asked"
_CHECKPOINTING = "gradient_checkpointing"


def write_program_page(
    arguments: argparse.Namespace,
    asked: AskedProgram,
    plan: programs.ProgramPlan,
    devices: programs.OnGpus,
    about: tuple[str, ...],
) -> None:
    """Write the page of a program that has a plan; where the user interrupts, of what is known by then.

    Raises:
        NoPrediction: its batches cannot have other rows.
        ConfigError: the file cannot be written.
    """
    if plan.about.seen is None:
        raise NoPrediction(
            f"--html: no DataLoader makes the batches of {asked.program.name}, so no other sizes are "
            "planned. Leave it out."
        )
    if (unit := plan.about.seen.unit) > 1:
        raise NoPrediction(
            f"--html: {asked.program.name} needs rows in multiples of {unit}, which a page does not have. "
            "Leave it out."
        )
    own = plan.answers[0].device
    # What is told about the machine is about one GPU.
    offered = () if devices.machine.is_told else names_to_choose(arguments.compare)
    if plan.about.card:
        offered = ()
    alike = asked.program.gpu.capability
    names = [
        name
        for name in offered_gpus(own.name, offered)
        if name not in gpus.GPUS or gpus.GPUS[name].capability == alike
    ]
    kinds = tuple(gpus.GPUS[name] for name in names if name != own.name)
    tables = _Tables(asked, plan, replace(devices, others=kinds))
    with suppress(KeyboardInterrupt):
        tables.ask()
    choices = tables.choices
    if not choices:
        write_page(arguments.html, None)
        return
    names = [own.name, *(kind.name for kind in kinds)]
    before_ampere = asked.program.gpu.before_ampere
    page = Page(
        subject=asked.program.name,
        command=shlex.join(
            ["tune-adaptive", "plan", *words_for_machine(arguments), *asked.command]
        ),
        rows_key=asked.rows_key,
        rows=plan.answers[0].peak.rows,
        accumulation=plan.micro_batches,
        devices=[(name, words_for_gpu(name, arguments)) for name in names],
        device=0,
        choices=choices,
        assumptions=about,
        missing=[*not_offered(before_ampere, arguments.compare), *tables.missing],
    )
    write_page(arguments.html, page)


class _Tables:
    """What the user asks, and that with one thing changed."""

    def __init__(
        self, asked: AskedProgram, plan: programs.ProgramPlan, devices: programs.OnGpus
    ) -> None:
        self._asked, self._plan, self._devices = asked, plan, devices
        seen = plan.about.seen
        assert seen is not None
        self._tokens = seen.tokens
        self._is_on = programs.CHECKPOINTED in plan.about.notes
        self._tables: dict[str, tuple[_Choice, Future[step_table.StepTable]]] = {}
        self._unfinished: set[str] = set()

    def ask(self) -> None:
        """Run what is not known, and wait for it; an interruption ends that, and keeps what is there."""
        changed = [*self._changed()]
        with TraceProgress(1 + len(changed), told_of) as progress, processes(_PRELOAD) as call:

            def ask(choice: _Choice, rows: tuple[int, ...] | None) -> Any:
                found = programs.tabulate(call, choice.program, self._devices, rows)
                self._tables[choice.name] = choice, found
                progress.follow(found, "the page")
                return found

            try:
                own = ask(self._own, None)
                progress.wait(own)
                rows = programs.table_of(own).rows
                for choice in changed:
                    ask(choice, rows)
                progress.wait()
            except KeyboardInterrupt:
                # What is worked on will be killed, which is no reason to be told.
                self._unfinished = {n for n, (_, one) in self._tables.items() if not one.done()}
                raise

    @property
    def choices(self) -> list[PageChoice]:
        """The choices that have an answer, the user's own first."""
        return [
            PageChoice(
                choice.length,
                choice.ranks,
                "on" if choice.checkpointed else "off",
                choice.overrides,
                programs.table_of(found),
            )
            for name, (choice, found) in self._tables.items()
            if self._failure(name) is None
        ]

    @property
    def missing(self) -> list[str]:
        """Those that have none, with the reason."""
        failures = ((name, self._failure(name)) for name in self._tables)
        return [f"{name}: {reason}" for name, reason in failures if reason]

    def _failure(self, name: str) -> str | None:
        """The reason why there is no table; None if there is one."""
        _, found = self._tables[name]
        if name in self._unfinished or found.cancelled():
            return NOT_FINISHED
        error = found.exception()
        return str(error) if error else None

    @property
    def _own(self) -> _Choice:
        asked = self._asked
        length = self._tokens if asked.settings is None else asked.settings["max_length"]
        return _Choice(_AS_ASKED, asked.program, length, self._plan.ranks, self._is_on)

    def _changed(self) -> Iterator[_Choice]:
        """What is changed: checkpointing, the length of rows, and the number of GPUs."""
        own, asked, program = self._own, self._asked, self._asked.program
        if asked.settings is not None:
            on = not self._is_on
            yield replace(
                own,
                name="other checkpointing",
                program=asked.with_settings(**{_CHECKPOINTING: on}),
                checkpointed=on,
                overrides=f"{_CHECKPOINTING}={str(on).lower()}",
            )
        for length in (own.length // 2, 2 * own.length) if self._tokens > 1 else ():
            if length >= 2:
                other = replace(program, length=length)
                if asked.settings is not None:
                    other = asked.with_settings(max_length=length)
                yield replace(own, name=f"rows of {length:,} tokens", program=other, length=length)
        if self._devices.machine.gpus_in_a_node is None:
            for ranks in other_numbers_of_gpus(own.ranks):
                name = counted(ranks, "GPU")
                yield replace(own, name=name, program=replace(program, ranks=ranks), ranks=ranks)


@dataclass(frozen=True)
class _Choice:
    """One of the programs of a page."""

    name: str
    program: programs.Program
    length: int
    ranks: int
    checkpointed: bool
    overrides: str = ""
