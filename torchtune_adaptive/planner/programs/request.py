"""What is asked about a program, and the answer. No torch in here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from torchtune_adaptive.planner.memory.gpus import Gpu
from torchtune_adaptive.planner.memory.peak import DeviceLimits
from torchtune_adaptive.planner.speed.speed import Pace
from torchtune_adaptive.planner.traced_run import Answer


@dataclass(frozen=True)
class Program:
    """A program, and what is known of its run."""

    words: tuple[str, ...]
    """A script, ``-m`` and a module, or a command of an installed package; and its arguments."""
    gpu: Gpu
    ranks: int | None = None
    """The number of GPUs, each of which is a rank of the program; None for as many as its launcher says."""
    rows: int | None = None
    """Rows of a batch, if not the program's own."""
    length: int | None = None
    """Tokens of a row, if not those of its longest row."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """Values that the program asks for and nobody knows, by the place where it does."""
    shows: bool = False
    """Whether what it prints is shown, with the traceback where it fails."""

    @property
    def name(self) -> str:
        return " ".join(self.words[: 1 + (self.words[0] == "-m")])


class Seen(NamedTuple):
    """What a program's batches are like."""

    rows: int
    """The rows that the program has in a batch."""
    tokens: int
    """The tokens of a row; 1 where rows are none of tokens."""
    looked_at: int
    """The rows among which the longest was looked for."""
    read: int = 0
    """The rows that were read of a dataset with more; 0 if all were."""
    there: int = 0
    """The rows of that dataset."""


class ProgramPlan(NamedTuple):
    """The memory and the speed of a program's steps, on each device that was asked about."""

    answers: Sequence[Answer]
    ranks: int
    seen: Seen | None
    """None where its batches are not made by a loader, so that they cannot have other rows."""
    micro_batches: int
    """Their number in a step."""
    compiles: bool
    """Whether it compiles something, which is planned as if it did not."""
    uncounted: frozenset[str] = frozenset()
    """Kernels of its own that multiply matrices, of whose time only that of reading and writing is known."""
    choices: Mapping[str, str] = MappingProxyType({})
    """How a router, say, chose by scores that nobody knows, by the place, where more depends on that."""


Devices = Callable[[int], Sequence[tuple[DeviceLimits, Pace | None]]]
"""What gives devices, and what their speed follows from if that is known, by the number of ranks. Another
process can import it."""
