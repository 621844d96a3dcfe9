"""Thousands of ranks that exchange signs of life, in one process and in simulated time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torchtune_adaptive.core.ranks.signs import Sign, lost_rank
from torchtune_adaptive.core.ranks.star import Star

KEY = b"known to the ranks"
BEAT = 2.0


class CountingStore:
    """A key-value store in memory, and what a rank has asked it for; the ranks share ``values``."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values
        self.requests: Counter[str] = Counter()
        self.keys_read = self.bytes_read = self.bytes_written = self.largest_request = 0

    def set(self, key: str, value: str) -> None:
        self.requests["set"] += 1
        self.values[key] = value.encode()
        self.bytes_written += len(value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests["multi_get"] += 1
        found = [self.values[key] for key in keys]
        self.keys_read += len(keys)
        self.bytes_read += sum(map(len, found))
        self.largest_request = max(self.largest_request, len(keys))
        return found


class Fleet:
    """Ranks that are all alike, until ``change`` or ``mute`` makes one different.

    Args:
        size: the number of ranks.
        listeners: the ranks that read and judge, beside rank 0; the others only publish. All, if not given.
    """

    def __init__(self, size: int, listeners: Iterable[int] | None = None) -> None:
        self.size, self.now, self.beats = size, 0.0, 0
        self.listeners = [*range(1, size)] if listeners is None else sorted({*listeners} - {0})
        self.muted: set[int] = set()
        self.signs = [Sign("step 7", 100, 30.0) for _ in range(size)]
        self.values: dict[str, bytes] = {}
        self.stores = [CountingStore(self.values) for _ in range(size)]
        self.stars: list[Star] = []
        for rank in range(size):
            store: Any = self.stores[rank]
            own, clock = partial(self._own, rank), partial(self.clock, rank)
            self.stars.append(Star(store, rank, size, KEY, own, clock))
            self.stars[rank].publish()

    def clock(self, rank: int) -> float:
        """No two machines' clocks agree."""
        return self.now + 1e4 * rank

    def change(self, rank: int, **changes: Any) -> None:
        self.signs[rank] = replace(self.signs[rank], **changes)

    def change_all(self, **changes: Any) -> None:
        for rank in range(self.size):
            self.change(rank, **changes)

    def mute(self, rank: int) -> None:
        """This rank neither publishes nor reads from now on."""
        self.muted.add(rank)

    def beat(self, limit: float) -> dict[int, str | None]:
        """Two seconds later: one exchange of all ranks, and the verdicts of those that judge."""
        self.now += BEAT
        self.beats += 1
        verdicts = {}
        reads = {0, *self.listeners}
        for rank in range(
            self.size - 1, -1, -1
        ):  # rank 0 last: the others read what it wrote a beat ago
            if rank in self.muted:
                continue
            if rank not in reads:
                self.stars[rank].publish()
                continue
            others = self.stars[rank].exchange()
            verdicts[rank] = lost_rank(self.signs[rank], others, self.stars[rank].read, limit)
        return verdicts

    def until_named(self, limit: float, within: float) -> dict[int, tuple[float, str]]:
        """What each rank that judges says first, and after how many seconds; until all have said it."""
        start = self.now
        first: dict[int, tuple[float, str]] = {}
        judges = {0, *self.listeners} - self.muted
        while self.now - start < within and len(first) < len(judges):
            for rank, verdict in self.beat(limit).items():
                if verdict is not None and rank not in first:
                    first[rank] = (self.now - start, verdict)
        return first

    def _own(self, rank: int) -> Sign:
        return replace(self.signs[rank], beats=self.beats)
