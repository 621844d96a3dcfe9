"""The rows of a trainer's steps, which stay the same when it is resumed on another number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import cycle, islice
from math import gcd, prod
from typing import Any

from torch.utils.data import BatchSampler

from torchtune_adaptive.common import UsageError, counted
from torchtune_adaptive.integrations import private

_NAMED = 6
"""The numbers of processes that an error names."""


@dataclass(frozen=True)
class StepRows:
    """The rows of a step: so many in a batch, in so many batches, on so many processes."""

    batch: int
    """``per_device_train_batch_size``."""
    accumulation: int
    """``gradient_accumulation_steps``."""
    processes: int

    @property
    def number(self) -> int:
        return prod(astuple(self))

    def on(self, processes: int) -> StepRows:
        """As many rows on another number of processes.

        In as many batches, if possible: where the trainer adds up the means of its batches, their number is a
        factor of the loss.

        Raises:
            UsageError: these processes cannot have equally many.
        """
        share, left = divmod(self.number, processes)
        if left:
            raise UsageError(
                f"resume_from_checkpoint: its steps have {counted(self.number, 'row')}, which "
                f"{counted(processes, 'process', 'processes')} cannot share equally. Processes that can: "
                f"{can_share(self.number, processes)}. For steps of another size, change the batch "
                "size or the accumulation."
            )
        batches = max(n for n in range(1, self.accumulation + 1) if share % n == 0)
        return StepRows(share // batches, batches, processes)

    def resumed(self, saved: Any) -> tuple[StepRows, StepRows]:
        """The rows that a run began with and those that it goes on with, where these are configured.

        Args:
            saved: what ``astuple`` gave of those that the checkpoint's run began with; None, if it has none.
        """
        began = self if saved is None else StepRows(*saved)
        if (began.batch, began.accumulation) != (self.batch, self.accumulation):
            return self, self  # somebody has changed them, so that is what is wanted
        return began, began.on(self.processes)


class DealtSteps:
    """The batch sampler of a process, in whose steps all processes have the rows of those that the run began
    with. They are dealt out one by one, so that a batch that is not full has some for each."""

    def __init__(self, batches: Any, began: StepRows, rows: StepRows, process: int) -> None:
        self._batches, self._began, self._rows, self._process = batches, began, rows, process
        self._sampler = getattr(batches, "batch_sampler", batches).sampler

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)  # accelerate looks for the sampler, to set its epoch

    @property
    def in_last(self) -> int:
        """The rows of the last step of an epoch, if it is not full. accelerate fills the batches of several
        processes with the first rows of the epoch."""
        left, began = len(self._sampler) % self._began.number, self._began
        over = left % (began.batch * began.processes)
        if over and self._batches.drop_last:
            return left - over
        return left - over + began.batch * began.processes if over and began.processes > 1 else left

    def __len__(self) -> int:
        full, last = len(self._sampler) // self._began.number, self.in_last
        return full * self._rows.accumulation - -last // (self._rows.batch * self._rows.processes)

    def __iter__(self) -> Iterator[list[int]]:
        rows, first = iter(self._sampler), []
        of_all, processes = self._rows.batch * self._rows.processes, self._rows.processes
        while step := list(islice(rows, self._began.number)):
            first = first or step
            if len(step) < self._began.number:
                step = [*step, *islice(cycle(first), self._began.number)][: self.in_last]
            for start in range(0, len(step), of_all):
                yield step[start : start + of_all][self._process :: processes]


def deal(loader: Any, began: StepRows, rows: StepRows, process: int) -> int | None:
    """Let a loader deal out the steps of a run that began on other processes, and give ``in_last``. Not on as
    many processes, and where batches are chosen otherwise than by their number of rows: that is None.

    Raises:
        UsageError: the last step of an epoch has fewer rows than there are processes.
    """
    base = getattr(loader, "base_dataloader", loader)
    batches = getattr(base, "batch_sampler", None)
    inner = getattr(batches, "batch_sampler", batches)
    if began.processes == rows.processes or type(inner) is not BatchSampler:
        return None
    if inner.batch_size != rows.batch or getattr(batches, "split_batches", False):
        return None
    dealt = DealtSteps(batches, began, rows, process)
    if 0 < dealt.in_last < rows.processes:
        raise cannot_share_last(dealt.in_last, rows)
    private.replace_batch_sampler(base, lambda _: dealt)
    return dealt.in_last


def cannot_share_last(last: int, rows: StepRows) -> UsageError:
    """The error where the last step of an epoch has so many rows, too few or not equally many for each."""
    return UsageError(
        f"resume_from_checkpoint: the last step of an epoch has {counted(last, 'row')}, which "
        f"{counted(rows.processes, 'process', 'processes')} cannot share equally. Processes that can: "
        f"{can_share(gcd(last, rows.number), rows.processes)}."
    )


def can_share(rows: int, processes: int) -> str:
    """The numbers of processes that can share so many rows equally, near one that cannot."""
    work = [n for n in range(1, rows + 1) if rows % n == 0]
    return ", ".join(map(str, sorted(sorted(work, key=lambda n: abs(n - processes))[:_NAMED])))
