"""The rows of a trainer's steps, which stay the same when it is resumed on another number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import chain, cycle, islice
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
            raise cannot_share("its steps have", self.number, processes)
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

    def __init__(self, inner: BatchSampler, began: StepRows, rows: StepRows, process: int) -> None:
        self._began, self._process = began, process
        # What accelerate looks at, such as the sampler, to set its epoch.
        self.batch_sampler, self.batch_size, self.num_processes = inner, rows.batch, rows.processes
        # On several processes, it fills batches with the first rows of the epoch.
        number, at_once = len(inner.sampler), began.batch * began.processes  # type: ignore[arg-type]
        filled = -number % at_once if began.processes > 1 else 0
        self.number = number - number % at_once if inner.drop_last else number + filled
        """The rows of an epoch."""

    def __len__(self) -> int:
        return -(-self.number // (self.batch_size * self.num_processes))

    def __iter__(self) -> Iterator[list[int]]:
        rows = iter(self.batch_sampler.sampler)
        first = [*islice(rows, self._began.number)]
        rows = islice(chain(first, rows, cycle(first)), self.number)
        while batch := [*islice(rows, self.batch_size * self.num_processes)]:
            yield batch[self._process :: self.num_processes]


def sampled_by(loader: Any) -> tuple[Any, Any, Any]:
    """torch's loader, inside of accelerate's; its batch sampler; and that from which all processes take."""
    base = getattr(loader, "base_dataloader", loader)
    batches = getattr(base, "batch_sampler", None)
    return base, batches, getattr(batches, "batch_sampler", batches)


def deal(loader: Any, began: StepRows, rows: StepRows, process: int) -> int | None:
    """Let a loader deal out the steps of a run that began on other processes, and give the rows of an epoch's
    last, 0 if it is full. None if its batches stay, as where they are not chosen by their size."""
    base, batches, inner = sampled_by(loader)
    if began.processes == rows.processes or getattr(batches, "split_batches", False):
        return None
    if type(inner) is not BatchSampler or inner.batch_size != rows.batch:
        return None
    dealt = DealtSteps(inner, began, rows, process)
    last = dealt.number % began.number
    if 0 < last < rows.processes:
        raise cannot_share("the last step of an epoch has", last, rows.processes, began.number)
    private.replace_batch_sampler(base, lambda _: dealt)
    return last


def cannot_share(which: str, rows: int, processes: int, of_others: int = 0) -> UsageError:
    """The error where processes cannot have equally many rows of a step, whose others have ``of_others``."""
    return UsageError(
        f"resume_from_checkpoint: {which} {counted(rows, 'row')}, which "
        f"{counted(processes, 'process', 'processes')} cannot share equally. Processes that can: "
        f"{can_share(gcd(rows, of_others), processes)}. For steps of another size, change the batch size or "
        "the accumulation."
    )


def can_share(rows: int, processes: int) -> str:
    """The numbers of processes that can share so many rows equally, near one that cannot."""
    work = [n for n in range(1, rows + 1) if rows % n == 0]
    return ", ".join(map(str, sorted(sorted(work, key=lambda n: abs(n - processes))[:_NAMED])))
