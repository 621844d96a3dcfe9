"""Keep the ranks together when one of them runs out of memory.

FSDP runs every forward and backward as a sequence of collectives. A rank that stops in the middle leaves the
others waiting in the next one until the process group times out. So it does not stop:

- Once (twice, to check that it repeats) the sequence is *recorded*, and while it is, all ranks agree
  before each collective, so that nobody enters one that another rank will miss.
- From then on, a rank that runs out of memory drops its graph and launches *the rest of the recorded
  sequence* with scratch buffers. Nobody waits, nobody asks, and a healthy step pays nothing. The others
  learn that the step is lost from the all-reduce that ends it anyway (see ``step.train_step``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.ranks import fsdp
from torchtune_adaptive.ranks.agreement import Ranks

_ALIGNMENT = 512  # bytes; allocators align the start of a buffer like this


class AnotherRankFailed(Exception):
    """Raised where a rank would enter a collective that another rank will not enter."""


@dataclass
class _Sequence:
    """The collectives of one kind of pass, by phase, and how often in a row they have been these."""

    recorded: dict[str, list[fsdp.Collective]] = field(default_factory=dict)
    equal_passes: int = 0


class Collectives:
    """The collectives of a pass, e.g. one forward and backward: recorded, then completed where a rank fails.

    A pass is a sequence of named *phases*; between them the ranks may do something else together. Passes of
    different kinds have different sequences, each recorded by itself.

    Args:
        models: the models that run in a pass.
        ranks: the ranks of the run.
        device: where the models run.
        launched: called after each launch: there is no finer sign of progress.
        reducing: sees the gradients that FSDP reduces, but not the scratch buffers of ``finish``.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        ranks: Ranks,
        device: torch.device,
        launched: Callable[[], None] = lambda: None,
        reducing: fsdp.Reducing | None = None,
    ) -> None:
        self._ranks = ranks
        self._device = device
        self._launched = launched
        self._sequences: dict[str, _Sequence] = {}
        self._sequence = _Sequence()
        self._pass: dict[str, list[fsdp.Collective]] = {}
        self._count: dict[str, int] = {}
        self._phase = ""
        for model in models:
            fsdp.watch_collectives(model, self._watch, reducing)

    @property
    def recording(self) -> bool:
        """Whether the sequence is not certain yet: a failure must be announced before the next collective."""
        return self._ranks.size > 1 and self._sequence.equal_passes < 2

    def record_again(self) -> None:
        """Forget the sequences: from the next pass on, they are others."""
        self._sequences.clear()

    def begin_pass(self, kind: str = "training") -> None:
        self._sequence = self._sequences.setdefault(kind, _Sequence())
        self._pass, self._count = {}, {}

    def begin_phase(self, phase: str) -> None:
        self._phase = phase
        self._pass[phase], self._count[phase] = [], 0

    def end_pass(self) -> bool:
        """End a pass without failure on this rank; whether the other ranks completed it, too."""
        if self.failed_elsewhere():
            return False
        sequence = self._sequence
        if not self.recording:
            expected = {phase: len(collectives) for phase, collectives in sequence.recorded.items()}
            # Not a constant sequence after all: record it again, in agreement.
            if self._count != expected:
                sequence.equal_passes = 0
        elif self._pass == sequence.recorded:
            sequence.equal_passes += 1
        else:
            sequence.recorded, sequence.equal_passes = self._pass, 1
        return True

    def failed_elsewhere(self) -> bool:
        """While recording: whether another rank has announced a failure, so that continuing would hang."""
        return self.recording and self._ranks.any(False)

    def announce_failure(self) -> None:
        """While recording: answer the agreement that every other rank is about to enter."""
        self._ranks.any(True)

    def finish(self, phase: str) -> None:
        """Launch what is left of a recorded phase, so that no rank waits for this one.

        The data is worthless, and every rank discards it. By now the memory of the failed step has been
        freed, which is more than the scratch buffer takes.
        """
        rest = self._sequence.recorded.get(phase, [])[self._count.setdefault(phase, 0) :]
        self._count[phase] += len(rest)
        self._launch_on_scratch(rest)

    def _launch_on_scratch(self, rest: Sequence[fsdp.Collective]) -> None:
        if not rest:
            return
        input_at = max(_aligned(collective.output_bytes) for collective in rest)
        size = input_at + max(collective.input_bytes for collective in rest)
        scratch = torch.zeros(size, dtype=torch.uint8, device=self._device)
        for collective in rest:
            output = scratch[: collective.output_bytes].view(collective.dtype)
            input = scratch[input_at : input_at + collective.input_bytes].view(collective.dtype)
            collective.launch(output, input)
            self._launched()

    def _watch(
        self,
        launch: Callable[[], Any],
        descriptions: tuple[Callable[[], fsdp.Collective], ...],
    ) -> Any:
        if self.recording:
            if self.failed_elsewhere():
                raise AnotherRankFailed
            self._pass[self._phase] += [describe() for describe in descriptions]
        # Counted first: where a launch raises, it raises while waiting for what has been launched.
        self._count[self._phase] += 1
        self._launched()
        following = descriptions[1:]
        try:
            launched = launch()
        except Exception:
            if self.recording:  # nobody agrees before what follows, so the others are in it
                self._launch_on_scratch([describe() for describe in following])
            raise
        self._count[self._phase] += len(following)
        return launched


class NoCollectives:
    """Does nothing in place of ``Collectives``, where a step is not to survive running out of memory."""

    recording = False

    def __init__(self, models: Iterable[nn.Module], reducing: fsdp.Reducing | None = None) -> None:
        if reducing is not None:
            for model in models:
                fsdp.watch_collectives(model, fsdp.launch_only, reducing)

    def record_again(self) -> None: ...

    def begin_pass(self, kind: str = "training") -> None: ...

    def begin_phase(self, phase: str) -> None: ...

    def end_pass(self) -> bool:
        return True

    def failed_elsewhere(self) -> bool:
        return False

    def announce_failure(self) -> None: ...

    def finish(self, phase: str) -> None: ...


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
