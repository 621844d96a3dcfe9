"""The steps of a loop whose loader keeps rows: the size of micro-batches, found, learned, and kept."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset

from torchtune_adaptive.common import UsageError, announce
from torchtune_adaptive.core import Generators
from torchtune_adaptive.integrations.host_state import HostState
from torchtune_adaptive.integrations.options import Adaptive
from torchtune_adaptive.integrations.rows import Keeping, KeptRows, RowsOfStep, longest, tokens_in
from torchtune_adaptive.integrations.summary import summary
from torchtune_adaptive.integrations.terms import Found, Terms
from torchtune_adaptive.library import (
    AdaptiveStep,
    BatchSize,
    Outcome,
    find_batch_size,
    find_fastest,
)

log = logging.getLogger(__name__)

_NO_LIMIT = (
    "no search: a CPU has no memory limit of its own. Pass one, such as "
    'Adaptive(memory_limit="16GiB"), or --memory-limit 16GiB of the command.'
)
_NO_LENGTH = "the loader has no dataset with a length, so there is no longest row to try"


class RowStep(ABC):
    """The steps of one run of a loop.

    Args:
        owner: the object whose attributes a forward pass changes.
        restored: the names of these.
        loader: the loader, whose batches are ``KeptRows``.
        keeping: what has made them; by default, the loader's collate function.
    """

    def __init__(
        self,
        owner: Any,
        restored: Sequence[str],
        options: Adaptive,
        loader: Any,
        device: torch.device,
        keeping: Keeping | None = None,
    ) -> None:
        self._owner, self._restored, self._options = owner, restored, options
        self._loader, self._device, self._known = loader, device, keeping
        self._step: AdaptiveStep | None = None
        self._size = 0
        self._rows_of_step = 0
        self._kept = HostState(owner, ())
        self._undivided: str | None = None
        """Why batches are not divided; None if they may be."""
        self._made: dict[tuple[int, ...], Any] = {}
        """What the loader has made of rows of the step that is taken, by their numbers."""
        self.slices = False
        """Whether micro-batches are slices of the batches that the loader has made, and not made anew."""

    @abstractmethod
    def new_step(self) -> AdaptiveStep:
        """What takes the steps; made by ``_step_of``."""

    @abstractmethod
    def _forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """The part of a micro-batch in the loss of this rank."""

    def _scaled(self, batch: dict[str, Any]) -> torch.Tensor:
        """The same, scaled where the loop scales what it calls backward on."""
        return self._forward(batch)

    @abstractmethod
    def around(self, step: AdaptiveStep) -> AbstractContextManager[None]:
        """The context in which steps are taken."""

    @abstractmethod
    def _configured(self) -> tuple[int, int, int]:
        """The rows of a micro-batch and of a step on a process, and the number of processes."""

    @abstractmethod
    def _saved(self) -> dict[str, Any] | None:
        """What ``learned`` was in the checkpoint that the loop resumes from."""

    def _checkpoint(self) -> str:
        """What to call that checkpoint."""
        return "a checkpoint"

    def _take(self, batches: Sequence[KeptRows]) -> Outcome:
        """Take a step with the rows of these batches."""
        rows = RowsOfStep(batches)
        self._rows_of_step, self._made = len(rows), rows.made()
        self._keep()
        begins, why = self._step is None, ""
        if self._step is None:
            self._step, why = self._begin(self.most_rows(len(rows)), batches[0])
            self._step.steps = self._steps_before(self._step)
        lengths, groups = self._lengths(rows), self._groups(batches)
        if self._whole and groups:
            self._size = max(self._size, *groups)  # a loader may have batches of any size
        if begins:
            self._announce_size(groups or [len(rows)], why)
        with self.around(self._step):
            return self._step(
                range(len(rows)),
                lambda part: self.batch_of(rows, part),
                self._size,
                lengths,
                groups,
                self._numbers(batches),
            )

    def _step_of(self, model: Any, optimizer: Any, **more: Any) -> AdaptiveStep:
        """A step of this object, up to the gradient: the loop clips it and steps the optimizer."""
        options = self._options
        return AdaptiveStep(
            model,
            optimizer,
            self._scaled,
            shares=True,
            optimizer_steps=False,
            memory_limit=options.memory_limit,
            grow_back_after=options.grow_back_after,
            sync_each_batch=options.sync_each_batch,
            wait_for_memory=options.wait_for_memory,
            restore=self.restore,
            **more,
        )

    @property
    def learned(self) -> dict[str, Any] | None:
        """What was found and learned, for a checkpoint."""
        if self._step is None:
            return None
        return {"size": self._size, "for": self.circumstances(), "step": self._step.state_dict()}

    @property
    def metrics(self) -> dict[str, int]:
        """What the loop logs beside its own metrics."""
        if self._step is None:
            return {}
        return {
            "adaptive/micro_batch": self._step.micro_batch,
            "adaptive/retried_steps": self._step.retried_steps,
        }

    def circumstances(self) -> str:
        """What the size was found for; with anything else, a resumed run searches again."""
        _, rows, processes = self._configured()
        return json.dumps([asdict(self._options), processes, rows])

    def _learned_before(self) -> dict[str, Any] | None:
        """What the checkpoint has ``learned``, if that holds for this run."""
        learned = self._saved()
        return learned if learned and learned["for"] == self.circumstances() else None

    # --- one micro-batch ------------------------------------------------------------------------

    @property
    def _keeping(self) -> Keeping:
        """The collate function that keeps the rows."""
        keeping = self._known or Keeping.of(self._loader)
        assert keeping is not None  # or its batches would have been refused
        return keeping

    def _repeats(self, batch: KeptRows) -> bool:
        """Whether rows make the same micro-batch each time, as those do that are not collated."""
        keeping = self._known or Keeping.of(self._loader)
        return keeping is None or keeping.repeats(batch, self._device)

    def _collated(self, rows: Sequence[Any]) -> Any:
        return self._keeping.again(rows)

    def _micro_batch(self, rows: Sequence[Any]) -> dict[str, Any]:
        return _with_rows(self._collated(rows), len(rows))

    def batch_of(self, rows: RowsOfStep, numbers: Sequence[int]) -> dict[str, Any]:
        """A micro-batch of some of the rows of a step: what the loader has made of them, if it has."""
        if self.slices:
            return _with_rows(rows.part(numbers), len(numbers))
        # Taken once only, as a step may change what it is given; after a loss it is made again.
        made = self._made.pop(tuple(numbers), None)
        if made is None:
            return self._micro_batch([rows[number] for number in numbers])
        return _with_rows(made, len(numbers))

    def _groups(self, batches: Sequence[KeptRows]) -> Sequence[int] | None:
        """The rows of a step that may share a micro-batch; None if all may."""
        if self._whole or self.slices:
            return [len(batch) for batch in batches]
        return None

    def _numbers(self, batches: Sequence[KeptRows]) -> Sequence[int] | None:
        """The numbers of the rows among those of all processes, where dropout follows them."""
        return None

    def _lengths(self, rows: Sequence[Any]) -> list[int] | None:
        """The tokens in each row, where micro-batches are sized in them; a row may have all there may be."""
        if not self._options.token_budget:
            return None
        return [max(1, min(tokens_in(self._collated([row])), self._size)) for row in rows]

    # --- before the first step ------------------------------------------------------------------

    def _begin(self, rows: int, first: KeptRows) -> tuple[AdaptiveStep, str]:
        """What takes the steps, whose first batch this is, and why micro-batches have their size."""
        options, step = self._options, self.new_step()
        self.slices = not all(step.ranks.gather(self._repeats(first)))
        self._undivided = undivided = self._look_at_loss(step)
        if self._whole:
            self._keep_whole(step)
        elif self.slices:
            self._refuse_options("micro-batches are parts of what data_collator has made")
        most = self._most(rows)
        ceiling = min(most, options.ceiling or most)
        self._size = self._configured()[0] if self._whole else min(self._begin_with(), ceiling)
        learned = self._learned_before()
        if learned:
            self._size = learned["size"]
            step.load_state_dict(learned["step"])
            return step, f", from {self._checkpoint()}"
        if undivided is not None:
            return step, f" (not divided: {undivided})" if undivided else ""
        why = [] if options.search else ["search=False"]
        searches = options.search and step.train_step.memory.measured
        if options.search and not searches:
            self._announce(step, _NO_LIMIT)
        drawn = Generators(self._device)  # collating may draw
        row = self._longest() if searches or options.token_budget else None
        if searches and row is None:
            self._announce(step, f"no search: {_NO_LENGTH}.")
        elif searches:
            found = self._search(step, row, ceiling, rows)
            self._size = int(found)
            why = [found.why] if found < rows or options.fastest else []
        if options.token_budget:
            why.insert(0, f"{self._size} of the longest row")
            self._size *= tokens_in(self._collated([row]))
        drawn.restore()
        return step, f" ({', '.join(why)})" if why else ""

    def most_rows(self, rows: int) -> int:
        """The most rows in a step of this process, whose first one has so many."""
        return rows

    def _steps_before(self, step: AdaptiveStep) -> int:
        """The steps that have been taken before the first of this loop."""
        return step.steps

    def _announce_size(self, groups: Sequence[int], why: str) -> None:
        """Say how a step is divided."""
        assert self._step is not None
        before, _, processes = self._configured()
        size, tokens = self._step.micro_batch or self._size, self._options.token_budget
        self._announce(self._step, summary(groups, size, tokens, why, before, processes))

    def _announce(self, step: AdaptiveStep, line: str) -> None:
        announce(log, line, rank_zero=step.ranks.is_zero)

    @property
    def _whole(self) -> bool:
        """Whether batches are not divided."""
        return self._undivided is not None

    def _look_at_loss(self, step: AdaptiveStep) -> str | None:
        """Find out what there is to know about the loss before a size is chosen; gives why batches cannot be
        divided, which may be obvious, and None if they can."""
        return normalizes(step) or None

    def _look(
        self, first: KeptRows, rows: Sequence[Any], look: Callable[..., Found], step: AdaptiveStep
    ) -> Found:
        """What the loss of micro-batches is a mean of: of rows that are collated again or, where that gives
        other losses, as by less padding, of parts of a batch; ``look`` finds it for one way."""
        found = Found(Terms.BATCH) if self.slices else look(rows, self._micro_batch)
        if found.terms.divides:
            return found
        why = ""
        try:
            first.part([0])
        except ValueError as error:
            why = str(error)
        if unknown := next(filter(None, step.ranks.gather(why)), ""):
            return Found(Terms.BATCH, found.why or f"data_collator makes {unknown}")
        part = lambda numbers: _with_rows(first.part(numbers), len(numbers))  # noqa: E731
        of_parts = look(range(len(first)), part)
        self.slices = self.slices or of_parts.terms.divides
        return of_parts

    def _keep_whole(self, step: AdaptiveStep) -> None:
        self._refuse_options("batches cannot be divided, because of their loss or layers")
        step.keep_whole()

    def _refuse_options(self, why: str) -> None:
        """Check that no option needs a size that is searched for."""
        for name in ("token_budget", "fastest"):
            if getattr(self._options, name):
                raise UsageError(f"{name}: {why}. Leave it off.")

    def _most(self, rows: int) -> int:
        """The most rows that a micro-batch of a step of so many may have."""
        return rows

    def _begin_with(self) -> int:
        """The rows of a micro-batch where no size is searched for."""
        return self._configured()[0]

    def _longest(self) -> Any:
        """The row that makes the largest batch; None if rows are not known before they come."""
        dataset = getattr(self._loader, "dataset", None)
        has_rows = all(hasattr(dataset, name) for name in ("__getitem__", "__len__"))
        if isinstance(dataset, IterableDataset) or not has_rows:
            self._refuse_options(_NO_LENGTH)
            return None
        with self._keeping.apart():
            return longest(dataset, self._loader.collate_fn, self._device)

    def _search(self, step: AdaptiveStep, row: Any, ceiling: int, rows: int) -> BatchSize:
        options = self._options
        find: Callable[..., BatchSize] = partial(find_batch_size, accumulation=rows)
        if options.fastest:
            if step.layers is None:
                raise UsageError(
                    "fastest: only trainers of transformers and TRL know which layers there are. Leave it "
                    "off."
                )
            find = partial(find_fastest, rows=rows)
        with self.around(step):
            return find(
                step,
                lambda size: self._micro_batch([row] * size),
                ceiling=ceiling,
                rounding="none" if options.token_budget else "power_of_two",
                search=options.search or "extrapolate",
                headroom=options.headroom,
            )

    # --- what a forward pass changes on the host ------------------------------------------------

    def _keep(self) -> None:
        self._kept = HostState(self._owner, self._restored)

    def restore(self) -> None:
        """Set back what a lost attempt has changed."""
        self._kept.restore()


def normalizes(step: AdaptiveStep) -> str:
    """Which layer normalizes over a batch; nothing if none does."""
    name = step.normalizing_layer
    return f"{name} normalizes over a batch" if name else ""


def _with_rows(inputs: Any, rows: int) -> dict[str, Any]:
    # Rows are told apart from inputs: the tensors of some collate functions have no row for each.
    return {"inputs": OnHost(inputs), "rows": torch.empty(rows)}


class OnHost:
    """A value that goes to the device where the loop sends it, such as a collated batch; and its weight."""

    def __init__(self, value: Any, weight: float = 1.0) -> None:
        self.value, self.weight = value, weight
