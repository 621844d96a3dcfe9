"""What a checkpoint says of training: one class, which alone knows how that is written and read."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch

from torchtune_adaptive.common import CheckpointError
from torchtune_adaptive.core import Generators, Split, knobs

VERSION = 2
_FORMER_KEYS = {"adaptive_batching.checkpoint": knobs.CHECKPOINT}
"""Keys of memory knobs as earlier versions wrote them, and those of now."""

NO_GENERATORS = torch.empty((0, 0), dtype=torch.uint8)
"""The random number generators where they are not needed: on ranks that do not save."""


@dataclass(frozen=True)
class GrowthState:
    """The batch of a run, and how it has grown."""

    start: list[int]
    """Micro-batch, accumulation and ranks of the batch that the run began with, as these ranks share it."""
    global_batch: int
    largest: int | None
    """The largest micro-batch that fits, as a search found it; None if there was no search."""
    decisions: list[list[int]]
    """Samples and global batch, at each change."""
    schedule: dict[str, Any]
    first: list[int] | None = None
    """The same of that batch when it was decided on, if that was on other ranks."""
    first_batch: int | None = None
    """The samples of that batch, where they are not the product of ``start``."""
    most: int | None = None
    """The global batch that it may grow to, where other ranks found ``largest``."""

    @property
    def decided(self) -> list[int]:
        """Micro-batch, accumulation and ranks of the first batch, when it was decided on."""
        return self.first or self.start

    @property
    def first_global_batch(self) -> int:
        micro_batch, accumulation, ranks = self.start
        return self.first_batch or micro_batch * accumulation * ranks

    @property
    def most_global_batch(self) -> int:
        """The global batch that the run may grow to, on any ranks; past it, only by accumulation."""
        micro_batch, accumulation, ranks = self.start
        return self.most or (self.largest or micro_batch) * accumulation * ranks

    def start_on(self, ranks: int, largest: int) -> Split:
        """The batch that the run began with, on another number of ranks."""
        # From the accumulation that was decided on: fewer ranks need more of it, and it would stay.
        return Split.of(self.first_global_batch, ranks, largest, self.decided[1])

    def now_on(self, ranks: int, largest: int) -> Split:
        """The batch as it has grown, on another number of ranks."""
        start = self.start_on(ranks, largest)
        return Split.of(self.global_batch, ranks, largest, start.accumulation)

    def keeps(self, configured: Split) -> bool:
        """Whether a config asks for the batch that the run began with, had the ranks not changed."""
        return configured.rows * self.decided[2] == self.first_global_batch


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
    generators: torch.Tensor
    """The random number generators of each rank, as rows of bytes."""
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
    dealt_to: int | None = None
    """The ranks that the order of samples was made for, where the ranks have changed."""

    @property
    def ranks_of_order(self) -> int:
        """The ranks that the order of samples was made for."""
        return self.dealt_to or self.growth.start[2]

    def write(self) -> dict[str, Any]:
        """The state in types that a checkpoint may hold."""
        written = {"version": VERSION, **vars(self), "growth": dict(vars(self.growth))}
        # Older versions do not know these, and can read what needs none of them.
        for part, newer in (
            (written["growth"], ("first", "first_batch", "most")),
            (written, ("rollouts", "dealt_to")),
        ):
            for name in newer:
                if part[name] is None:
                    del part[name]
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
            values["generators"] = _generators(values["generators"], version)
            if recovery := values["recovery"]:
                given_up = [[x, 0] if isinstance(x, int) else x for x in recovery["given_up"]]
                values["recovery"] = {"relief": 0, **recovery, "given_up": given_up}
            if chosen := values["knobs"]:
                values["knobs"] = {_FORMER_KEYS.get(key, key): chosen[key] for key in chosen}
            growth = {**values["growth"]}
            if rows := growth.pop("start_rows", None):  # of each rank, in version 0.2.0
                growth["first_batch"] = rows * growth["start"][2]
            return cls(**{**values, "growth": GrowthState(**growth)})
        except (KeyError, TypeError, ValueError, struct.error) as wrong:
            raise CheckpointError(
                f"The checkpoint's training state is damaged ({type(wrong).__name__}: {wrong}). Resume from "
                "another checkpoint."
            ) from None


def _generators(saved: Any, version: int) -> torch.Tensor:
    """The generators of each rank, which version 1 wrote as dictionaries."""
    if version < 2:
        return torch.stack([Generators.bytes_of(each) for each in saved])
    if not isinstance(saved, torch.Tensor) or (saved.dtype, saved.dim()) != (torch.uint8, 2):
        raise TypeError("generators: no rows of bytes")
    return saved
