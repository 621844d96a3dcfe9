"""The record of a trial: what one rank saw, what all ranks saw."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torchtune_adaptive.device.memory import Usage
from torchtune_adaptive.text import bytes_of


def trial_line(trial: SizeTrial) -> str:
    """One line for a trial, as soon as it is over."""
    decided = trial.deciding
    return (
        f"micro-batch {trial.size}: {decided.trouble or 'fits'}, peak "
        f"{bytes_of(decided.peak_bytes, decided.usable_bytes)} (rank {trial.deciding_rank}), "
        f"{trial.seconds:.1f} s"
    )


@dataclass(frozen=True)
class LengthTrial:
    """A trial, and the length of its rows."""

    length: int
    trial: SizeTrial


@dataclass(frozen=True)
class RankReport:
    """The outcome of a trial on one rank."""

    failed_in: str | None
    """The phase in which this rank ran out of memory."""
    peak_bytes: int
    peak_allocated_bytes: int
    retries: int
    usable_bytes: int
    """The memory that this rank may use: its capacity, less the headroom."""

    @property
    def free_bytes(self) -> int:
        return self.usable_bytes - self.peak_bytes

    @property
    def trouble(self) -> str | None:
        """Why the size does not fit on this rank."""
        if self.failed_in is not None:
            return f"out of memory in {self.failed_in}"
        if self.retries:
            return f"{self.retries} allocation retries"
        return None


@dataclass(frozen=True)
class SizeTrial:
    """The outcome of trying one size, on all ranks."""

    size: int
    seconds: float
    reports: tuple[RankReport, ...]

    @property
    def fits(self) -> bool:
        return all(report.trouble is None for report in self.reports)

    @property
    def only_retried(self) -> bool:
        """Whether the step was done on all ranks, but some allocator had to retry."""
        return not self.fits and all(report.failed_in is None for report in self.reports)

    @property
    def deciding_rank(self) -> int:
        """The rank that had trouble, or else the one with the least memory left."""
        ranks = range(len(self.reports))
        return min(
            ranks, key=lambda r: (self.reports[r].trouble is None, self.reports[r].free_bytes)
        )

    @property
    def deciding(self) -> RankReport:
        return self.reports[self.deciding_rank]

    @property
    def free_bytes(self) -> int:
        return self.deciding.free_bytes

    @property
    def usage(self) -> Usage:
        """The most that any rank used."""
        return Usage(
            max(report.peak_bytes for report in self.reports),
            max(report.peak_allocated_bytes for report in self.reports),
            sum(report.retries for report in self.reports),
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits, "deciding_rank": self.deciding_rank}
