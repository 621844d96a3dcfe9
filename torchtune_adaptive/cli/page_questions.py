"""The questions that a page answers: the user's own, and it with one thing changed; and their tables."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.cli.plan_progress import TraceProgress
from torchtune_adaptive.cli.what_if import other_checkpointing
from torchtune_adaptive.common import AdaptiveBatchingError, counted
from torchtune_adaptive.planner import DeviceLimits, Pace, gpus
from torchtune_adaptive.recipe import (
    PlanRequest,
    StepTable,
    configured_checkpoint,
    on_devices,
    overrides,
    tabulated,
)

_GPUS = (
    "rtx4090-24gb",
    "rtx5090-32gb",
    "l40s-48gb",
    "a100-80gb",
    "h100-80gb",
    "h200-141gb",
    "b200-192gb",
    "mi300x-192gb",
)
"""GPUs to choose from, beside the one that is asked for, unless others are named."""
_RANKS = (1, 2, 4, 8)


Again = Callable[..., PlanRequest]
"""Function that makes the user's request once more, with another ``cfg``, ``ranks`` or ``length``."""


@dataclass(frozen=True)
class PageQuestion:
    """A question of the page, about all micro-batches and GPUs that can be chosen there."""

    plan: PlanRequest
    overrides: str = ""
    """What to type for it beside the length of rows and the number of GPUs."""

    @property
    def checkpointing(self) -> str:
        """Which activations are computed again."""
        return configured_checkpoint(self.plan.asked)


@dataclass(frozen=True)
class PageAnswer:
    """The tables of one question."""

    question: PageQuestion
    table: StepTable
    other_rank: StepTable | None = None
    """The same for the rank with another share of the parameters, if there is one."""


@dataclass(frozen=True)
class _Asked:
    question: PageQuestion
    table: Future[StepTable]


class PageTables:
    """The tables of a page. They are asked for when the plan itself is there, and what is known when the user
    interrupts that is enough for a page.

    Args:
        plan: what the user asks.
        again: function that makes the same request with changes.
        devices: names of the GPUs to choose from, beside the one that is asked for.
    """

    def __init__(self, plan: PlanRequest, again: Again, devices: tuple[str, ...] = _GPUS) -> None:
        self._plan, self._again = plan, again
        self.devices = _offered(plan, devices)
        """The Names of the GPUs to choose from, the one that is asked for among them."""
        self.missing: list[str] = []
        """Questions without an answer, each with the reason."""
        self._asked: list[_Asked] = []
        self._others: dict[int, Future[StepTable]] = {}

    def ask(self, ask: Callable[..., Future[Any]], progress: TraceProgress) -> None:
        """Ask for the tables, and wait for them."""
        progress.expect_more(1)
        own = PageQuestion(self._plan)
        self._asked.append(
            _Asked(own, ask(tabulated, self._plan.query(), self._limits(self._plan)))
        )
        progress.wait(self._asked[0].table)
        rows = self._asked[0].table.result().rows
        others = list(self._questions())
        progress.expect_more(len(others))
        for one in others:
            table = ask(tabulated, one.plan.query(), self._limits(one.plan), rows)
            self._asked.append(_Asked(one, table))
        progress.wait(*(one.table for one in self._asked))
        self._ask_other_ranks(ask, progress)

    def _ask_other_ranks(self, ask: Callable[..., Future[Any]], progress: TraceProgress) -> None:
        for number, one in enumerate(self._asked):
            if one.table.exception() is None and (table := one.table.result()).uneven:
                progress.expect_more(1)
                plan = one.question.plan
                rank = 0 if table.rank == plan.ranks - 1 else plan.ranks - 1
                query, limits = plan.query(rank=rank), self._limits(plan)
                self._others[number] = ask(tabulated, query, limits, table.rows, False)
        progress.wait(*self._others.values())

    def known(self) -> list[PageAnswer]:
        """The answers so far, the user's question first; none if that has no answer yet. What has none is
        ``missing``."""
        found: list[PageAnswer] = []
        for number, (question, table) in enumerate(
            (one.question, one.table) for one in self._asked
        ):
            name = _name(self._plan, question)
            if (reason := _failure(table)) is not None:
                self.missing.append(f"{name}: {reason}")
                continue
            uneven = table.result().uneven
            other = self._others.get(number)
            if uneven and (other is None or _failure(other) is not None):
                reason = _failure(other) if other else _UNFINISHED
                self.missing.append(f"{name}: {reason}")
                continue
            found.append(PageAnswer(question, table.result(), other.result() if other else None))
        return found if found and found[0].question.plan is self._plan else []

    def _limits(self, plan: PlanRequest) -> list[tuple[DeviceLimits, Pace | None]]:
        if len(self.devices) == 1:
            return [(plan.device, plan.query().pace)]
        return on_devices(plan, ",".join(self.devices))

    def _questions(self) -> Iterator[PageQuestion]:
        """The user's question with one thing changed: checkpointing, row length, number of GPUs."""
        plan = self._plan
        makers: list[tuple[str, Callable[[], PageQuestion]]] = []
        if (
            not plan.asked.settings.activation_checkpointing
        ):  # which says what torchtune's keys cannot
            makers.append(("other checkpointing", self._with_other_checkpointing))
        for length in (plan.length // 2, 2 * plan.length):
            if length >= 2:
                about = f"rows of {length:,} tokens"
                makers.append((about, partial(self._with, length=length)))
        for ranks in self._numbers_of_gpus():
            about = counted(ranks, "GPU")
            makers.append((about, partial(self._with, ranks=ranks)))
        for about, make in makers:
            try:
                yield make()
            except AdaptiveBatchingError as error:
                self.missing.append(f"{about}: {error}")

    def _with(self, **changes: int) -> PageQuestion:
        return PageQuestion(self._again(**changes))

    def _with_other_checkpointing(self) -> PageQuestion:
        changes = OmegaConf.create(other_checkpointing(self._plan.asked))
        changed = OmegaConf.merge(self._plan.cfg, changes)
        assert isinstance(changed, DictConfig)
        typed = shlex.join(overrides(self._plan.cfg, changed))
        return PageQuestion(self._again(cfg=changed), typed)

    def _numbers_of_gpus(self) -> list[int]:
        """Others than the user's; none where the nodes are told, which say how many there are."""
        plan = self._plan
        if plan.machine.gpus_in_a_node is not None:
            return []
        numbers = {*_RANKS, 2 * plan.ranks} - {plan.ranks}
        return sorted(n for n in numbers if n % plan.asked.holders == 0)


_UNFINISHED = "not finished"


def _failure(table: Future[StepTable]) -> str | None:
    """Why there is no table; None if there is one."""
    if not table.done() or table.cancelled():
        return _UNFINISHED
    error = table.exception()
    return str(error) if error else None


def _offered(plan: PlanRequest, names: tuple[str, ...]) -> tuple[str, ...]:
    """The GPUs to choose from: one where an amount of memory or something about the machine is told."""
    name = plan.device.name
    if name not in gpus.GPUS or plan.machine.is_told:
        return (name,)
    found = {name: None} | {gpus.gpu(each.strip()).name: None for each in names}
    order = list(gpus.GPUS)
    return tuple(sorted(found, key=order.index))


def _name(plan: PlanRequest, question: PageQuestion) -> str:
    """What differs from the user's question."""
    asked = question.plan
    if asked.length != plan.length:
        return f"rows of {asked.length:,} tokens"
    if asked.ranks != plan.ranks:
        return counted(asked.ranks, "GPU")
    return question.overrides or "as asked"
