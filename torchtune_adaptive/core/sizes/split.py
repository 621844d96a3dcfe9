"""The division of rows: of a global batch into micro-batches, and their sizes; of an epoch into steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torchtune_adaptive.common import ConfigError, counted

Rounding = Literal["power_of_two", "divisor", "none"]


def candidates(rounding: Rounding, ceiling: int, rows_per_step: int) -> tuple[int, ...]:
    """The sizes that a micro-batch may have, ascending; 1 is always among them.

    Args:
        rounding: ``power_of_two``, ``divisor`` (of ``rows_per_step``), or ``none``.
        ceiling: the largest size that may be a candidate.
        rows_per_step: the rows that one rank contributes to one optimizer step.
    """
    if rounding == "power_of_two":
        return tuple(1 << power for power in range(ceiling.bit_length()))
    if rounding == "divisor":
        return tuple(size for size in range(1, ceiling + 1) if rows_per_step % size == 0)
    if rounding == "none":
        return tuple(range(1, ceiling + 1))
    raise ValueError(f"no such rounding: {rounding!r}")


@dataclass(frozen=True)
class Split:
    """The parts of a global batch."""

    micro_batch: int
    accumulation: int
    ranks: int
    rows: int = 0
    """Rows on each rank; given where the last micro-batch is smaller than the others. Where ranks do not
    divide the global batch, some have one row less."""
    global_batch: int = 0
    """Rows of all ranks; given where ranks do not divide it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.rows or self.micro_batch * self.accumulation)
        object.__setattr__(self, "global_batch", self.global_batch or self.rows * self.ranks)

    @classmethod
    def of(cls, global_batch: int, ranks: int, largest: int, accumulation: int) -> Split:
        """The split of a global batch: no more micro-batches than are needed, as equal as can be, and no
        fewer than ``accumulation``, so that a growing batch widens its micro-batches first.

        Raises:
            ConfigError: there are fewer rows than ranks.
        """
        if global_batch < ranks:
            raise ConfigError(
                "batch_size",
                global_batch,
                f"is all rows of a step, and not one for each of {counted(ranks, 'rank')}",
                "Use fewer ranks",
            )
        rows = -(-global_batch // ranks)
        accumulation = max(accumulation, -(-rows // largest))
        micro_batch = -(-rows // accumulation)
        return cls(micro_batch, -(-rows // micro_batch), ranks, rows, global_batch)

    def in_micro_batches(self, size: int) -> Split:
        """The same rows, in micro-batches of another size."""
        return replace(self, micro_batch=size, accumulation=-(-self.rows // size))

    def text(self) -> str:
        ranks, most = counted(self.ranks, "rank"), self.micro_batch * self.accumulation
        uneven = ", the last ones smaller" if most * self.ranks > self.global_batch else ""
        return (
            f"micro-batch {self.micro_batch} x accumulation {self.accumulation} x {ranks}{uneven}"
        )


@dataclass(frozen=True)
class Epochs:
    """The epochs of a run, in which samples become positions in its base schedule.

    The base schedule is that of the run whose batch never grows. Its steps are positions, and the run is
    at one of them by the samples that it has used, however many steps it took to use them.
    """

    samples: int
    """Samples that an epoch may use, over all ranks."""
    base_batch: int
    """Samples in a base step."""

    @classmethod
    def of(cls, samples: int, split: Split, max_steps: int | None) -> Epochs:
        """The epochs of a run, at most ``max_steps`` of its first split each. A run without a step would save
        untrained weights, and is refused."""
        if samples < split.global_batch:
            raise ConfigError(
                "batch_size",
                split.micro_batch,
                f"with gradient_accumulation_steps {split.accumulation} on {counted(split.ranks, 'rank')} "
                f"makes steps of {counted(split.global_batch, 'sample')}, and the data has {samples:,}",
                "Lower batch_size or gradient_accumulation_steps, or use more data",
            )
        if max_steps is not None:
            samples = min(samples, max_steps * split.global_batch)
        return cls(samples, split.global_batch)

    @property
    def base_steps(self) -> int:
        """Base steps in an epoch."""
        return self.samples // self.base_batch

    def position(self, epoch: int, used: int) -> int:
        """The number of base steps completed by a run that has used ``used`` samples of its epoch."""
        return epoch * self.base_steps + min(used // self.base_batch, self.base_steps)

    def progress(self, epoch: int, used: int) -> float:
        return epoch + used / self.samples
