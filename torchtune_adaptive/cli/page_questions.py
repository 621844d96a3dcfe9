"""The questions that a page answers about a config: the user's own, and it with one thing changed."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.cli.page_choices import (
    GPUS,
    NOT_FINISHED,
    Page,
    PageChoice,
    names_to_choose,
    not_offered,
    offered_gpus,
    other_numbers_of_gpus,
    require_file,
    words_for_gpu,
    words_for_machine,
)
from torchtune_adaptive.cli.plan_progress import TraceProgress
from torchtune_adaptive.cli.what_if import other_checkpointing
from torchtune_adaptive.common import AdaptiveBatchingError, ConfigError, NoPrediction, counted
from torchtune_adaptive.planner import DeviceLimits, Pace, step_table
from torchtune_adaptive.recipe import (
    PlanRequest,
    configured_checkpoint,
    on_devices,
    overrides,
    tabulated,
)

Again = Callable[..., PlanRequest]
"""Function that makes the user's request once more, with another ``cfg``, ``ranks`` or ``length``."""
_CHECKPOINTING = {"all": "on", "none": "off", "operations": "some operations"}


@dataclass
class _PageQuestion:
    """A question about all micro-batches and GPUs, and the answers."""

    name: str
    plan: PlanRequest
    overrides: str = ""
    """What to type for it beside the length of rows and the number of GPUs."""
    table: Future[step_table.StepTable] | None = None
    other_rank: Future[step_table.StepTable] | None = None
    """The answer for the rank with another share of the parameters, if there is one."""

    @property
    def failure(self) -> str | None:
        """The reason why there is no answer; None if there is one."""
        if reason := _failure(self.table):
            return reason
        uneven = self.table is not None and self.table.result().uneven
        return _failure(self.other_rank) if uneven else None

    def forget_unfinished(self) -> None:
        if self.table is not None and not self.table.done():
            self.table = None
        if self.other_rank is not None and not self.other_rank.done():
            self.other_rank = None


class PageTables:
    """The tables of a page. They are asked for when the plan itself is there, and what is known when the user
    interrupts that is enough for a page.

    Args:
        plan: what the user asks.
        again: function that makes the same request with changes.
        devices: names of the GPUs to choose from, beside the one that is asked for.
    """

    def __init__(self, plan: PlanRequest, again: Again, devices: tuple[str, ...] = GPUS) -> None:
        self._plan, self._again = plan, again
        # What is told about the machine is about one GPU.
        self._devices = offered_gpus(plan.device.name, () if plan.machine.is_told else devices)
        self._asked: list[_PageQuestion] = []
        self._refused: list[str] = []

    def ask(self, ask: Callable[..., Future[Any]], progress: TraceProgress) -> None:
        """Ask for the tables, and wait for them."""
        try:
            self._ask(ask, progress)
        except KeyboardInterrupt:
            # What is worked on will be killed, which is no reason to be told.
            for one in self._asked:
                one.forget_unfinished()
            raise

    def _ask(self, ask: Callable[..., Future[Any]], progress: TraceProgress) -> None:
        own = _PageQuestion("as asked", self._plan)
        progress.expect_more(1)
        self._asked.append(own)
        own.table = ask(tabulated, self._plan.query(), self._limits(self._plan))
        progress.wait(own.table)
        rows = own.table.result().rows
        others = list(self._questions())
        progress.expect_more(len(others))
        for one in others:
            self._asked.append(one)
            one.table = ask(tabulated, one.plan.query(), self._limits(one.plan), rows)
        progress.wait(*(one.table for one in self._asked if one.table))
        self._ask_other_ranks(ask, progress)

    def _ask_other_ranks(self, ask: Callable[..., Future[Any]], progress: TraceProgress) -> None:
        for one in self._asked:
            if _failure(one.table) is None and one.table and (table := one.table.result()).uneven:
                progress.expect_more(1)
                last = one.plan.ranks - 1
                query = one.plan.query(rank=0 if one.plan.query().rank == last else last)
                limits = [(device, None) for device, _ in self._limits(one.plan)]
                one.other_rank = ask(tabulated, query, limits, table.rows)
        progress.wait(*(one.other_rank for one in self._asked if one.other_rank))

    def page(self, arguments: argparse.Namespace) -> Page | None:
        """The page with what is known; None if the user's own question has no answer yet."""
        if not self._asked or self._asked[0].failure is not None:
            return None
        plan, names = self._plan, self._devices
        return Page(
            subject=plan.name,
            command=_command(plan, arguments),
            rows_key="batch_size",
            rows=plan.query().rows,
            accumulation=plan.asked.accumulation,
            devices=[(name, words_for_gpu(name, arguments)) for name in names],
            device=names.index(plan.device.name),
            choices=[_choice(one) for one in self._asked if one.failure is None],
            assumptions=(f"length of rows: {plan.length_source}", *plan.assumptions),
            missing=[
                *not_offered(plan.device.before_ampere, arguments.compare),
                *self._refused,
                *(f"{one.name}: {one.failure}" for one in self._asked if one.failure is not None),
            ],
        )

    def _limits(self, plan: PlanRequest) -> list[tuple[DeviceLimits, Pace | None]]:
        if len(self._devices) == 1:
            return [(plan.device, plan.query().pace)]
        return on_devices(plan, ",".join(self._devices))

    def _questions(self) -> Iterator[_PageQuestion]:
        """The user's question with one thing changed: checkpointing, row length, number of GPUs."""
        plan = self._plan
        makers: dict[str, Callable[[], tuple[PlanRequest, str]]] = {}
        # Our own setting says what torchtune's keys cannot.
        if not plan.asked.settings.activation_checkpointing:
            makers["other checkpointing"] = self._with_other_checkpointing
        for length in (plan.length // 2, 2 * plan.length):
            if length >= 2:
                makers[f"rows of {length:,} tokens"] = partial(self._with, length=length)
        # The nodes that are told say how many GPUs there are.
        if plan.machine.gpus_in_a_node is None:
            for ranks in other_numbers_of_gpus(plan.ranks, plan.asked.holders):
                makers[counted(ranks, "GPU")] = partial(self._with, ranks=ranks)
        for name, make in makers.items():
            try:
                yield _PageQuestion(name, *make())
            except AdaptiveBatchingError as error:
                self._refused.append(f"{name}: {error}")

    def _with(self, **changes: int) -> tuple[PlanRequest, str]:
        return self._again(**changes), ""

    def _with_other_checkpointing(self) -> tuple[PlanRequest, str]:
        changes = OmegaConf.create(other_checkpointing(self._plan.asked))
        changed = OmegaConf.merge(self._plan.cfg, changes)
        assert isinstance(changed, DictConfig)
        return self._again(cfg=changed), shlex.join(overrides(self._plan.cfg, changed))


def tables_for(plan: PlanRequest, arguments: argparse.Namespace, again: Again) -> PageTables | None:
    """The tables of the page that is asked for; None if none is.

    Raises:
        ConfigError: the page cannot be written, or not together with another option.
        NoPrediction: there are no pages of such plans.
    """
    if arguments.html is None:
        return None
    if plan.asked.kind.generates:
        raise NoPrediction(
            "--html is not for recipes that generate the rows that they train on: a page shows steps alone. "
            "Leave it out."
        )
    if arguments.fastest or arguments.may_change is not None:
        reason = "shows one configuration, and --fastest is about many"
        raise ConfigError("--html", str(arguments.html), reason, "Leave one of the two out")
    require_file(arguments.html)
    return PageTables(plan, again, names_to_choose(arguments.compare))


def _failure(table: Future[step_table.StepTable] | None) -> str | None:
    """The reason why there is no table; None if there is one."""
    if table is None or not table.done() or table.cancelled():
        return NOT_FINISHED
    error = table.exception()
    return str(error) if error else None


def _choice(one: _PageQuestion) -> PageChoice:
    assert one.table is not None
    shown = configured_checkpoint(one.plan.asked)
    return PageChoice(
        one.plan.length,
        one.plan.ranks,
        _CHECKPOINTING.get(shown, shown.replace("_", " ")),
        one.overrides,
        one.table.result(),
        one.other_rank.result() if one.other_rank else None,
    )


def _command(plan: PlanRequest, arguments: argparse.Namespace) -> str:
    """What to type for the same config."""
    changes = [word for word in arguments.words if "=" in word or word.startswith("~")]
    changes = [word for word in changes if not word.startswith("batch_size=")]
    words = ["tune-adaptive", "plan", plan.name]
    return shlex.join([*words, *words_for_machine(arguments), *changes])
