"""The machines of a run, told apart by a folder that each of them may have for itself, such as its memory."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torchtune_adaptive.core import Ranks
from torchtune_adaptive.recipe.checkpoints.all_or_none import AllOrNone, reason


@dataclass(frozen=True)
class Places:
    """Which ranks see the same folder at a path; those are in one place."""

    rank: int
    """This rank."""
    firsts: tuple[int, ...]
    """For each rank, the first one in its place, which does there what rank 0 does for all."""
    hosts: tuple[str, ...]
    """For each rank, the name of its machine."""

    @classmethod
    def one(cls, ranks: Ranks) -> Places:
        """All ranks in one place."""
        return cls(ranks.rank, (0,) * ranks.size, (socket.gethostname(),) * ranks.size)

    @classmethod
    def found(cls, folder: Path, everyone: AllOrNone) -> Places:
        """The places of the ranks, which all call this; the folder is made where it is not there.

        Raises:
            CheckpointError: on all ranks, if one cannot write to it.
        """
        mark = folder / f".place.{everyone.decide(lambda: uuid.uuid4().hex[:8])}"
        ranks = everyone.ranks

        def describe(error: BaseException) -> str:
            return f"{folder}: {reason(error)}"

        with everyone.together(describe):
            folder.mkdir(parents=True, exist_ok=True)
            is_mine = _write_first(mark, str(ranks.rank))
        with everyone.together(describe, (OSError, ValueError)):
            writer = int(mark.read_text())
        if is_mine:  # all have read it
            mark.unlink(missing_ok=True)
        writers, hosts = zip(*everyone.gather((writer, socket.gethostname())), strict=True)
        return cls(ranks.rank, tuple(map(writers.index, writers)), hosts)

    @property
    def leaders(self) -> list[int]:
        """The first rank of each place."""
        return sorted({*self.firsts})

    @property
    def are_several(self) -> bool:
        return len(self.leaders) > 1

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of its place."""
        return self.firsts[self.rank] == self.rank

    def beside(self, rank: int) -> list[int]:
        """All ranks in the place of one."""
        return [each for each, first in enumerate(self.firsts) if first == self.firsts[rank]]

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """For each rank, one of the next place, another one for each as far as there are; in one place, the
        rank itself."""
        there = dict(zip(self.leaders, [*self.leaders[1:], self.leaders[0]], strict=True))
        by_place = {leader: self.beside(leader) for leader in self.leaders}
        found = list(range(len(self.firsts)))
        for leader, ranks in by_place.items() if self.are_several else ():
            next_ranks = by_place[there[leader]]
            for number, rank in enumerate(ranks):
                found[rank] = next_ranks[number % len(next_ranks)]
        return tuple(found)

    def named(self, ranks: Sequence[int]) -> str:
        """Some ranks with their machines, for messages."""
        return ", ".join(f"rank {each} ({self.hosts[each]})" for each in ranks)


def _write_first(file: Path, content: str) -> bool:
    """Write a file unless another rank has; whether it was this one."""
    try:
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as opened:
        opened.write(content)
    return True
