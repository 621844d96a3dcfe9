"""Which of many cases a test takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """All operations of a run, or every n-th, others with each shard.

    Args:
        exhaustive: whether a test should prove all it can.
        shard: a number that chooses the first operation.
        stride: from each operation to the next.
    """

    exhaustive: bool
    shard: int
    stride: int

    def every(self, exhaustive: int, quick: int) -> Sample:
        """The same with other strides, one for each tier."""
        return Sample(self.exhaustive, self.shard, exhaustive if self.exhaustive else quick)

    def of(self, operations: int) -> range:
        """Operations to fail at, counted from 1: at least one, if there are any."""
        first = self.shard % min(self.stride, max(operations, 1))
        return range(1 + first, operations + 1, self.stride)
