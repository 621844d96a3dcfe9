"""The division of rows: of a global batch into micro-batches, and their sizes; of an epoch into steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchtune_adaptive.common import BatchIncreaseError, ConfigError, counted

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
    """Rows on each rank; given where the last micro-batch is smaller than the others."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.rows or self.micro_batch * self.accumulation)

    @property
    def global_batch(self) -> int:
        return self.rows * self.ranks

    @classmethod
    def of_rows(cls, rows: int, ranks: int, largest: int, accumulation: int) -> Split:
        """The split of ``rows`` on each rank: no more micro-batches than are needed, as equal as can be, and
        no fewer than configured, so that a growing batch widens its micro-batches first."""
        accumulation = max(accumulation, -(-rows // largest))
        micro_batch = -(-rows // accumulation)
        return cls(micro_batch, -(-rows // micro_batch), ranks, rows)

    @classmethod
    def resumed(cls, global_batch: int, ranks: int, largest: int, accumulation: int) -> Split:
        """The split of a global batch that a checkpoint has, on another number of ranks.

        Raises:
            BatchIncreaseError: the ranks cannot share it equally.
        """
        rows, left = divmod(global_batch, ranks)
        if left or not rows:
            work = [n for n in range(1, global_batch + 1) if global_batch % n == 0]
            nearest = sorted(sorted(work, key=lambda n: abs(n - ranks))[:6])
            raise BatchIncreaseError(
                f"The checkpoint's global batch is {counted(global_batch, 'sample')}, which {ranks} ranks "
                "cannot share equally. Resume on a number of ranks that divides it: "
                f"{', '.join(map(str, nearest))}."
            )
        return cls.of_rows(rows, ranks, largest, accumulation)

    def text(self) -> str:
        ranks = counted(self.ranks, "rank")
        return f"micro-batch {self.micro_batch} x accumulation {self.accumulation} x {ranks}"


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
