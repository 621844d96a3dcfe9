"""The record of a trial: what one rank saw, what all ranks saw."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, ClassVar

from torchtune_adaptive.common import NothingFits, bytes_of, counted, human_bytes
from torchtune_adaptive.core.device.memory import Usage


@dataclass(frozen=True, kw_only=True)
class RankReport(Usage):
    """The outcome of a trial on one rank, with its use of memory."""

    failed_in: str | None
    """The stage in which this rank ran out of memory."""
    usable_bytes: int
    """Usable memory: the capacity of this rank, less the headroom; in the first steps, the whole capacity."""

    @property
    def free_bytes(self) -> int:
        return self.usable_bytes - self.peak_bytes

    @property
    def trouble(self) -> str | None:
        """Why the size does not fit on this rank."""
        if self.failed_in is not None:
            return f"out of memory in {self.failed_in}"
        if self.retries:
            return counted(self.retries, "allocation retry", "allocation retries")
        return None


@dataclass(frozen=True)
class SizeTrial:
    """The outcome of trying one size, on all ranks."""

    COLUMNS: ClassVar = tuple(
        ["micro-batch", "verdict", "peak", "usable", "tightest rank", "seconds"]
    )
    """The headings of ``cells``."""

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
        """The most that any rank used, and the retries of all."""
        return reduce(Usage.__or__, self.reports, Usage(0, 0, 0))

    def nothing_fits(self, row: str, remedy: str) -> NothingFits:
        """Why not even one row can be trained, and what would change that."""
        failed = self.deciding
        return NothingFits(
            f"Not even {self.size} {row} fits: {failed.trouble} on rank {self.deciding_rank}, which needed "
            f"more than {failed.peak_bytes:,} bytes and could have {failed.usable_bytes:,}. {remedy}"
        )

    def line(self) -> str:
        """One line for the log, as soon as the trial is over."""
        decided = self.deciding
        return (
            f"micro-batch {self.size}: {decided.trouble or 'fits'}, peak "
            f"{bytes_of(decided.peak_bytes, decided.usable_bytes)} (rank {self.deciding_rank}), "
            f"{self.seconds:.1f} s"
        )

    def cells(self) -> tuple[str, ...]:
        """The trial as a row of a table."""
        decided = self.deciding
        return (
            str(self.size),
            decided.trouble or "fits",
            human_bytes(decided.peak_bytes),
            human_bytes(decided.usable_bytes),
            str(self.deciding_rank),
            f"{self.seconds:.1f}",
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits, "deciding_rank": self.deciding_rank}
