"""The rows of a trainer's steps, which stay as many when it is resumed on another number of processes."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import prod
from typing import Any

from torchtune_adaptive.common import UsageError, counted

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


def can_share(rows: int, processes: int) -> str:
    """The numbers of processes that can share so many rows equally, near one that cannot."""
    work = [n for n in range(1, rows + 1) if rows % n == 0]
    return ", ".join(map(str, sorted(sorted(work, key=lambda n: abs(n - processes))[:_NAMED])))
