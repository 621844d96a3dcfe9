"""The page of a step of transformers' or TRL's trainers: ``--html`` with ``--trainer``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
from torchtune_adaptive.planner import DeviceLimits, processes, step_table, told_of

if TYPE_CHECKING:
    from torchtune_adaptive.library import Plan, TransformersStep

_PRELOAD = "torchtune_adaptive.library.preload"
_AS_ASKED = "as asked"
ROWS = "per_device_train_batch_size"
"""The setting that has the rows of a micro-batch."""


def write_step_page(
    arguments: argparse.Namespace,
    step: TransformersStep,
    plan: Plan,
    device: DeviceLimits,
    question: dict[str, Any],
) -> None:
    """Write the page of a step that has a plan; where the user interrupts, of what is known by then.
    ``question`` has the arguments of ``step.plan``, and whether speeds are known (``timed``).

    Raises:
        NoPrediction: memory depends on more than a page shows.
        ConfigError: the file cannot be written.
    """
    if plan.experts and plan.experts.differ:
        raise NoPrediction(
            "--html: memory depends on where routers send tokens, which a page does not show. Use "
            "experts_implementation=grouped_mm, or leave --html out."
        )
    # What is told about the machine is about one GPU.
    is_told = question["machine"].is_told
    names = offered_gpus(device.name, () if is_told else names_to_choose(arguments.compare))
    own = names.index(device.name)
    on = [question["gpu"] if name == device.name else name for name in names]
    tables = _Tables(step, on, own, question)
    with suppress(KeyboardInterrupt):
        tables.ask()
    if not tables.choices:
        write_page(arguments.html, None)
        return
    page = Page(
        subject=f"{arguments.hf.name}, {step.trainer}",
        command=_command(arguments),
        rows_key=ROWS,
        rows=step.per_device_train_batch_size,
        accumulation=step.gradient_accumulation_steps,
        devices=[(name, words_for_gpu(name, arguments)) for name in names],
        device=own,
        choices=tables.choices,
        assumptions=plan.assumptions,
        missing=[*not_offered(device.before_ampere, arguments.compare), *tables.missing],
    )
    write_page(arguments.html, page)


class _Tables:
    """What the user asks, and that with one thing changed.

    Args:
        step: what the user asks.
        gpus: the names of the GPUs.
        own: the place of the one that the user asks for.
        question: the arguments of ``step.plan``, and ``timed``.
    """

    def __init__(
        self,
        step: TransformersStep,
        gpus: list[str],
        own: int,
        question: dict[str, Any],
    ) -> None:
        self._step, self._question = step, question
        self._gpus = gpus
        self._own = own
        self._tables: dict[str, tuple[TransformersStep, Future[step_table.StepTable]]] = {}
        self._unfinished: set[str] = set()

    def ask(self) -> None:
        """Trace what is not known, and wait for it; an interruption ends that, and keeps what is there."""
        changes = dict(_changes(self._step, self._has_other_ranks))
        with TraceProgress(1 + len(changes), told_of) as progress, processes(_PRELOAD) as call:
            rest = [self._question[each] for each in ("memory", "headroom", "machine", "timed")]

            def ask(name: str, step: TransformersStep, rows: tuple[int, ...] | None) -> Any:
                found = call(step.table, self._gpus, self._own, rows, *rest)
                self._tables[name] = step, found
                progress.follow(found, "the page")
                return found

            try:
                own = ask(_AS_ASKED, self._step, None)
                progress.wait(own)
                rows = own.result().rows
                for name, change in changes.items():
                    ask(name, replace(self._step, **change), rows)
                progress.wait()
            except KeyboardInterrupt:
                # What is worked on will be killed, which is no reason to be told.
                self._unfinished = {n for n, (_, one) in self._tables.items() if not one.done()}
                raise

    @property
    def _has_other_ranks(self) -> bool:
        """Whether there may be another number of GPUs: no nodes say it."""
        return self._question["machine"].gpus_in_a_node is None

    @property
    def choices(self) -> list[PageChoice]:
        """The choices that have an answer, the user's own first."""
        return [
            self._choice(step, table.result())
            for name, (step, table) in self._tables.items()
            if self._failure(name) is None
        ]

    @property
    def missing(self) -> list[str]:
        """Those that have none, with the reason."""
        failures = ((name, self._failure(name)) for name in self._tables)
        return [f"{name}: {reason}" for name, reason in failures if reason]

    def _failure(self, name: str) -> str | None:
        """The reason why there is no table; None if there is one."""
        _, table = self._tables[name]
        if name in self._unfinished or table.cancelled():
            return NOT_FINISHED
        error = table.exception()
        return str(error) if error else None

    def _choice(self, step: TransformersStep, table: step_table.StepTable) -> PageChoice:
        is_on = step.gradient_checkpointing
        overrides = ""
        if is_on != self._step.gradient_checkpointing:
            overrides = f"gradient_checkpointing={str(is_on).lower()}"
        checkpointing = "on" if is_on else "off"
        return PageChoice(step.max_length, step.ranks, checkpointing, overrides, table)


def _changes(step: TransformersStep, has_other_ranks: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The settings that are changed: checkpointing, the length of rows, and perhaps the number of GPUs."""
    yield "other checkpointing", {"gradient_checkpointing": not step.gradient_checkpointing}
    for length in (step.max_length // 2, 2 * step.max_length):
        if length >= 2:
            yield f"rows of {length:,} tokens", {"max_length": length}
    if has_other_ranks:
        for ranks in other_numbers_of_gpus(step.ranks):
            if ranks > 1 or not step.fsdp:
                yield counted(ranks, "GPU"), {"ranks": ranks}


def _command(arguments: argparse.Namespace) -> str:
    """What to type for the same step; the page adds the rows and their length."""
    words = ["tune-adaptive", "plan"]
    given = {
        "--hf": arguments.hf.given,
        "--trainer": arguments.trainer,
        "--method": arguments.method,
    }
    words += [word for pair in given.items() if pair[1] for word in map(str, pair)]
    left_out = (f"{ROWS}=", "max_length=")
    changes = [word for word in arguments.words if "=" in word and not word.startswith(left_out)]
    return shlex.join([*words, *words_for_machine(arguments), *changes])
