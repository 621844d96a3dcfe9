"""Keep the ranks together in FSDP's collectives when one of them runs out of memory.

This is the first part of Note [Failure before a collective] in ``step.failures``:

- Once (twice, to check that it repeats) the sequence is *recorded*, and while it is, all ranks agree
  before each collective, so that nobody enters one that another rank will miss. Collectives that are not
  FSDP's cannot be recorded; they are noticed, and refused.
- From then on, a rank that runs out of memory drops its graph and launches *the rest of the recorded
  sequence* with scratch buffers. Nobody waits, nobody asks, and a healthy step pays nothing. The others
  learn that the step is lost from the all-reduce that ends it anyway.
- Before a collective of the caller's own, such as a gather of metrics, the ranks *vote*, always. A rank that
  has failed launches what is recorded up to there, and votes; then all know.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core.private import launches_of
from torchtune_adaptive.core.ranks import fsdp
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.ranks.unseen import Unseen

T = TypeVar("T")
_ALIGNMENT = 512  # bytes; allocators align the start of a buffer like this
_FAILED, _UNSEEN = 1, 2  # what ranks tell each other while recording; the largest counts


class AnotherRankFailed(Exception):
    """Raised where a rank would enter a collective that another rank will not enter."""


class _Vote:
    """What stands for a vote in a sequence."""


_VOTE = _Vote()


@dataclass
class _Sequence:
    """The collectives of one kind of pass, by phase, and how often in a row they have been these."""

    recorded: dict[str, list[fsdp.Collective | _Vote]] = field(default_factory=dict)
    equal_passes: int = 0


class Collectives:
    """The collectives of a pass, e.g. one forward and backward: recorded, then completed where a rank fails.

    A pass is a sequence of named *phases*; between them the ranks may do something else together. Passes of
    different kinds, and of each ``variant`` of the models, have different sequences, each recorded by itself.

    Args:
        models: the models that run in a pass.
        ranks: the ranks of the run.
        device: the device of the models.
        launched: function called after each launch: there is no finer sign of progress.
        reducing: function called with gradients that FSDP reduces, but not with the buffers of ``finish``.
        survive: whether a pass may fail; if not, nothing is recorded, and ``launched`` is not called.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        ranks: Ranks,
        device: torch.device,
        launched: Callable[[], None] = lambda: None,
        reducing: fsdp.Reducing | None = None,
        survive: bool = True,
    ) -> None:
        self._ranks = ranks
        self._survive = survive
        self._device = device
        self._launched = launched
        self._sequences: dict[tuple[Hashable, str], _Sequence] = {}
        self._sequence = _Sequence()
        self._pass: dict[str, list[fsdp.Collective | _Vote]] = {}
        self._count: dict[str, int] = {}
        self._phase = ""
        self._open = _Open()
        self._unseen = Unseen(models if survive else ())
        self._in_step = False
        self.variant: Hashable = None
        """What decides which collectives the models launch from the next pass on, where that can change."""
        self.disturbed = False
        """Whether the models have run between steps since the last reset; see ``step.train_step``."""
        if survive or reducing is not None:
            for model in models:
                fsdp.watch_collectives(model, self._watch, reducing)

    @property
    def recording(self) -> bool:
        """Whether the sequence is not certain yet: a failure must be announced before the next collective."""
        return self._survive and self._ranks.size > 1 and self._sequence.equal_passes < 2

    def end_step(self) -> None:
        """End a step: what is launched from now on, as when the caller evaluates the model, is in no pass."""
        self._in_step = False

    def begin_pass(self, kind: str = "training") -> None:
        self._in_step = True
        self._sequence = self._sequences.setdefault((self.variant, kind), _Sequence())
        self._pass, self._count = {}, {}
        self._open = _Open()
        self._unseen.count = 0

    def begin_phase(self, phase: str) -> None:
        self._phase = phase
        self._pass[phase], self._count[phase] = [], 0
        if self.recording:
            self._unseen.announce()

    def end_phase(self) -> None:
        """End a phase without failure on this rank."""
        self._close()
        if self.recording:
            self._unseen.look()

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
        return self.recording and self._agree()

    def _agree(self, failed: bool = False) -> bool:
        """Tell the others, while recording, whether this rank has failed; whether any rank has.

        Raises:
            UsageError: on every rank, if one has noticed a collective of the model's own.
        """
        worst = self._ranks.spread(_UNSEEN if self._unseen.count else _FAILED * failed)[1]
        if worst == _UNSEEN:
            raise UsageError(
                "model: it launches collectives of its own in a step, as with context parallelism, "
                "SyncBatchNorm, or an all_reduce in forward. A rank that runs out of memory cannot complete "
                "them, and the others would wait for it. Spread the model by fully_shard or "
                "DistributedDataParallel alone, and communicate between steps; or, in a recipe, choose "
                "batch_size yourself and set adaptive_batching.on_out_of_memory=raise."
            )
        return worst == _FAILED

    def finish(self, phase: str) -> bool:
        """Launch what the others wait for, after a failure on this rank; whether they know of it then.

        The data is worthless, and every rank discards it. By now the memory of the failed step has been
        freed, which is more than the scratch buffer takes.

        While recording, the others wait for what they have agreed to launch, and learn of the failure where
        they would agree next. Afterward they go through the rest of the recorded phase.
        """
        known = self._pass if self.recording else self._sequence.recorded
        launched = self._count.get(phase, 0) + self._open.launched()
        self._open = _Open()
        rest, vote = _up_to_vote(known.get(phase, [])[launched:])
        self._count[phase] = launched + len(rest)
        self._launch_on_scratch(rest)
        if vote or self.recording:
            self._agree(failed=True)
            return True
        return False

    def together(self, launch: Callable[[], T]) -> T:
        """Launch a collective of the caller's own; where a rank of a step has failed, on none."""
        if not self._survive or not self._in_step or self._ranks.size == 1:
            return launch()
        self._close()
        recording = self.recording
        if recording:
            self._unseen.look()
        if self._agree():
            raise AnotherRankFailed
        if recording:
            self._pass[self._phase].append(_VOTE)
        self._count[self._phase] += 1
        result = launch()
        if recording:
            self._unseen.announce()
        return result

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

    def _watch(self, launch: Callable[[], Any], collectives: Sequence[fsdp.Collective]) -> Any:
        if not self._survive or not self._in_step:
            self.disturbed = self._survive
            return launch()
        self._close()
        known, recording = self._sequence.recorded, self.recording
        if recording:
            self._unseen.look()
            if self._agree():
                raise AnotherRankFailed
            self._pass[self._phase] += collectives
            known = self._pass
        at = self._count[self._phase]
        following = known.get(self._phase, [])[at : at + len(collectives)]
        groups = [each.group for each in following if isinstance(each, fsdp.Collective)]
        self._open = _Open(len(collectives), groups)
        self._launched()
        result = launch()
        self._open.returned = True
        if recording:
            self._unseen.announce(*(collective.group for collective in collectives[1:]))
        return result

    def _close(self) -> None:
        """FSDP has gone on, so it has launched what it was launching."""
        if self._open.size:
            self._count[self._phase] += self._open.size
            self._open = _Open()


class _Open:
    """A collective that FSDP is launching, and those that it launches right after it without asking.

    A failure may come before or after each launch. The groups tell: they count what they launch. There are
    fewer groups than collectives where a pass is longer than the recorded one.
    """

    def __init__(self, size: int = 0, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self.size = size
        self.returned = False
        """Whether the first launch has returned."""
        self._before = [(group, launches_of(group)) for group in groups]

    def launched(self) -> int:
        """The number of them that have been launched."""
        unknown = self.size - len(self._before)
        return unknown + sum(self._was_launched(at) for at in range(len(self._before)))

    def _was_launched(self, at: int) -> bool:
        group, before = self._before[at]
        if before is None:  # The best guess: what raises in a launch does so where it waits.
            return at == 0 or self.returned
        return launches_of(group) != before


def _up_to_vote(
    rest: Sequence[fsdp.Collective | _Vote],
) -> tuple[list[fsdp.Collective], bool]:
    """The collectives before the first vote, and whether there is one."""
    before = list(takewhile(lambda each: isinstance(each, fsdp.Collective), rest))
    return before, len(before) < len(rest)  # type: ignore[return-value]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
