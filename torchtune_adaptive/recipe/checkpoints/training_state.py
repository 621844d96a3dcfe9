"""What a checkpoint says of training: one class, which alone knows how that is written and read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtune_adaptive.common import CheckpointError
from torchtune_adaptive.core import Split

VERSION = 1


@dataclass(frozen=True)
class GrowthState:
    """The batch of a run, and how it has grown."""

    start: list[int]
    """Micro-batch, accumulation and ranks of the batch that the run began with."""
    global_batch: int
    largest: int | None
    """The largest micro-batch that fits, as a search found it; None if there was no search."""
    decisions: list[list[int]]
    """Samples and global batch, at each change."""
    schedule: dict[str, Any]
    start_rows: int | None = None
    """Rows of each rank in the first batch, where its last micro-batch has fewer than the others."""

    def start_on(self, ranks: int, largest: int) -> Split:
        """The batch that the run began with, on another number of ranks."""
        micro_batch, accumulation, saved_ranks = self.start
        rows = self.start_rows or micro_batch * accumulation
        return Split.resumed(rows * saved_ranks, ranks, largest, accumulation)


@dataclass(frozen=True)
class TrainingState:
    """Everything besides model and optimizer that a run needs to continue as if it had never stopped.

    What is of type ``dict`` is known to the object that made it only.
    """

    global_step: int
    samples: int
    """Samples used since the run began, over all ranks."""
    samples_of_epoch: int
    validated: int
    """The last step after which the run was validated."""
    generators: list[dict[str, Any]]
    """The random number generators of each rank."""
    token_budget: list[list[int]] | None
    """Row lengths and rows; empty where a budget was found and given up."""
    knobs: dict[str, Any] | None
    """The memory knobs in use; None where they were not written yet."""
    growth: GrowthState
    learning_rate: dict[str, Any]
    noise: dict[str, Any] | None
    recovery: dict[str, Any] | None
    retried_steps: int
    allocation_retries: int
    rollouts: dict[str, Any] | None = None
    """The sizes of the phases of rollouts, where rows are generated."""

    def write(self) -> dict[str, Any]:
        """The state in types that a checkpoint may hold."""
        growth = dict(vars(self.growth))
        if self.growth.start_rows is None:
            del growth["start_rows"]  # older versions do not know it
        written = {"version": VERSION, **vars(self), "growth": growth}
        if self.rollouts is None:
            del written["rollouts"]  # older versions do not know it
        return written

    @classmethod
    def read(cls, saved: Any) -> TrainingState:
        """The state that ``write`` gave, in this version of the package or an earlier one.

        Raises:
            CheckpointError: a newer version wrote it, or it is damaged.
        """
        try:
            # Version 0.1.0 wrote no version, knobs and step of validation, and sizes without reliefs.
            values = {"version": 1, "knobs": None, "validated": saved["global_step"], **saved}
            if (version := values.pop("version")) > VERSION:
                raise CheckpointError(
                    f"The checkpoint's training state has version {version}, and this torchtune-adaptive "
                    f"reads up to {VERSION}. Resume with the newer torchtune-adaptive that saved it."
                )
            if recovery := values["recovery"]:
                given_up = [[x, 0] if isinstance(x, int) else x for x in recovery["given_up"]]
                values["recovery"] = {"relief": 0, **recovery, "given_up": given_up}
            return cls(**{**values, "growth": GrowthState(**values["growth"])})
        except (KeyError, TypeError) as wrong:
            raise CheckpointError(
                f"The checkpoint's training state is damaged ({type(wrong).__name__}: {wrong}). Resume from "
                "another checkpoint."
            ) from None
