"""How ranks stay together when one of them runs out of memory.

FSDP runs every forward and backward as a sequence of collectives. A rank that leaves in the middle leaves
the others waiting in the next one until the process group times out. So it does not leave:

- Once (twice, to check that it repeats) the sequence is *recorded*, and while it is, all ranks agree
  before each collective, so that nobody enters one that another rank will miss.
- From then on, a rank that runs out of memory drops its graph and launches *the rest of the recorded
  sequence* with scratch buffers. Nobody waits, nobody asks, and a healthy step pays nothing. That the
  step is lost is said in the all-reduce that ends it anyway (see ``step``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.ranks import fsdp
from torchtune_adaptive.ranks.agreement import Ranks

_ALIGNMENT = 512  # of a scratch buffer's start, as an allocator would align it


class AnotherRankFailed(Exception):
    """Raised where a rank would enter a collective that another rank will not enter."""


class Collectives:
    """The collectives of a pass (one forward and backward): recorded, then finished when need be.

    A pass is a sequence of named *segments*; between them the ranks may do something else together.
    ``launched`` is called after each launch: there is no finer sign of progress. ``reducing`` sees the
    gradients that FSDP reduces, but not the scratch buffers that ``finish`` does.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        device: torch.device,
        launched: Callable[[], None] = lambda: None,
        reducing: fsdp.Reducing | None = None,
    ) -> None:
        self._ranks = ranks
        self._device = device
        self._launched = launched
        self._recorded: dict[str, list[fsdp.Collective]] = {}
        self._equal_passes = 0
        self._pass: dict[str, list[fsdp.Collective]] = {}
        self._count: dict[str, int] = {}
        self._segment = ""
        fsdp.watch_collectives(model, self._watch, reducing)

    @property
    def recording(self) -> bool:
        """Whether the sequence is not certain yet: a failure must be told before the next collective."""
        return self._ranks.size > 1 and self._equal_passes < 2

    def begin_pass(self) -> None:
        self._pass, self._count = {}, {}

    @contextmanager
    def segment(self, name: str) -> Iterator[None]:
        """Around one part of a pass."""
        self._segment = name
        self._pass[name], self._count[name] = [], 0
        yield

    def end_pass(self) -> bool:
        """After a pass without failure on this rank; whether the others, too, got through it."""
        if self.has_failed_elsewhere():
            return False
        if not self.recording:
            expected = {name: len(collectives) for name, collectives in self._recorded.items()}
            if (
                self._count != expected
            ):  # not a constant sequence after all: learn it again, in agreement
                self._equal_passes = 0
        elif self._pass == self._recorded:
            self._equal_passes += 1
        else:
            self._recorded, self._equal_passes = self._pass, 1
        return True

    def has_failed_elsewhere(self) -> bool:
        """While recording: whether another rank has told of its failure, so that going on would hang."""
        return self.recording and self._ranks.any(False)

    def tell_failure(self) -> None:
        """While recording: answer the question that every other rank is about to ask."""
        self._ranks.any(True)

    def finish(self, segment: str) -> None:
        """Launch what is left of a recorded segment, so that no rank waits for this one.

        The data is worthless and will be thrown away by all. Called when the failed step's memory has been
        given back, which is more than the scratch buffer takes.
        """
        rest = self._recorded.get(segment, [])[self._count.setdefault(segment, 0) :]
        if not rest:
            return
        input_at = max(_aligned(collective.output_bytes) for collective in rest)
        size = input_at + max(collective.input_bytes for collective in rest)
        scratch = torch.zeros(size, dtype=torch.uint8, device=self._device)
        for collective in rest:
            output = scratch[: collective.output_bytes].view(collective.dtype)
            input = scratch[input_at : input_at + collective.input_bytes].view(collective.dtype)
            collective.launch(output, input)
            self._count[segment] += 1
            self._launched()

    def _watch(self, launch: Callable[[], Any], describe: Callable[[], fsdp.Collective]) -> Any:
        if self.recording:
            if self.has_failed_elsewhere():
                raise AnotherRankFailed
            self._pass[self._segment].append(describe())
        # Noted first: where a launch raises, it raises while waiting for what has been launched.
        self._count[self._segment] += 1
        self._launched()
        return launch()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
