"""Work without gradients between steps, such as scoring or generating, in micro-batches that fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchtune_adaptive.common import UsageError, announce, counted
from torchtune_adaptive.core import Phase, TrainStep
from torchtune_adaptive.library.private import tree_map_only
from torchtune_adaptive.library.requests import shared_rows

log = logging.getLogger(__name__)


class ForwardOnly:
    """Work without gradients on any number of rows; made by ``AdaptiveStep.forward_only``.

    When memory runs out, only the micro-batch in which it did is done again, as smaller ones. It has a size
    of its own, which ``find_batch_size(step, batch, phase=...)`` finds.
    """

    def __init__(
        self,
        step: TrainStep,
        work: Callable[[Any], Any],
        name: str,
        worst_case: Callable[[int], Any] | None,
        gathers: bool,
        grow_back_after: int | None,
    ) -> None:
        self.step = step
        self.worst_case = worst_case
        self._work = work
        self._grow_back_after = grow_back_after
        self._size = (0, "row")
        self.phase: Phase[tuple[Any, int], Sequence[Any]] = Phase(
            name,
            step,
            self._results,
            gathers=step.model if gathers else None,
            adjusted=self._adjusted,
            advice="Use shorter rows, or allow more memory (memory_limit).",
        )

    def __call__(
        self,
        rows: Sequence[Any],
        collate_fn: Callable[[list[Any]], Any],
        size: int,
        lengths: Sequence[int] | None = None,
        groups: Sequence[int] | None = None,
    ) -> list[Any]:
        """Do the work.

        Args:
            rows: this rank's rows, at least one. Where others have more, it takes its first one again.
            collate_fn: function that makes a micro-batch of some of them.
            size: rows in a micro-batch, the same on every rank, as long as memory suffices. With ``lengths``:
                tokens in a micro-batch, padding included.
            lengths: the tokens in each of the rows, as for a step.
            groups: the numbers of rows that may share a micro-batch, as for a step.

        Returns:
            The result of each row, on the host.

        Raises:
            TrainingOutOfMemory: not even one row fits.
            UsageError: the ranks have different sizes, one has no rows, a row is longer than ``size`` allows,
                or the work does not give one result for each row.
        """
        shared = shared_rows(self.step, rows, collate_fn, size, lengths, groups, at_once=True)
        size = shared.size
        now = (size, "row" if lengths is None else "token")
        if now != self._size:
            self._size = now
            self.phase.begin(size, self._grow_back_after)
        if shared.own < shared.most:
            rows = [*rows, *[rows[0]] * (shared.most - shared.own)]
        results = self.phase.of_rows(
            rows, shared.divide, lambda some: (collate_fn(some), len(some))
        )
        return results[: shared.own]

    def state_dict(self) -> dict[str, Any]:
        """The state of recovery, for a checkpoint."""
        size, unit = self._size
        return {"size": size, "unit": unit, "recovery": self.phase.state_dict() if size else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was called."""
        self._size = state["size"], state["unit"]
        if state["size"]:
            self.phase.begin(state["size"], self._grow_back_after)
            self.phase.load_state_dict(state["recovery"])

    def _results(self, micro_batch: tuple[Any, int]) -> list[Any]:
        batch, rows = micro_batch
        made = self._work(self.step.to_device(batch))
        what = type(made).__name__
        found = None
        if isinstance(made, torch.Tensor):
            made = made.cpu()  # one copy for all rows: what is kept of a micro-batch is on the host
            found = len(made) if made.dim() else None
        elif isinstance(made, (list, tuple)):
            found = len(made)
            made = tree_map_only(torch.Tensor, torch.Tensor.cpu, made)
        if found != rows:
            size = "" if found is None else f" of {found}"
            raise UsageError(
                f"forward_only: {self.phase.name} gave a {what}{size} for {counted(rows, 'row')}. Return a "
                "tensor or a list with one result for each row."
            )
        return list(made)

    def _adjusted(self, reason: str, before: int, after: int) -> None:
        what = "micro-batch" if self._size[1] == "row" else "token budget"
        line = f"{what} of {self.phase.name} {before} -> {after} ({reason})"
        announce(log, line, logging.WARNING, rank_zero=self.step.ranks.is_zero)
