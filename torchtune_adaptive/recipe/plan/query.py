"""What a plan asks about a config."""

from __future__ import annotations

from dataclasses import dataclass

from torchtune_adaptive.core import Rounding
from torchtune_adaptive.planner import DeviceLimits, Pace, Question, TracedRun
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.tracing.traces import Traces


@dataclass(frozen=True)
class Query:
    """A question about one config."""

    asked: Asked
    ranks: int
    device: DeviceLimits
    length: int
    rank: int = 0
    confirmed: bool = False
    """Whether to trace the largest size itself, as a check of the way it was computed."""
    may_trace: bool = True
    """Whether to trace what is not remembered."""
    beside: bool = False
    """Whether to trace in two processes where that is quicker."""
    pace: Pace | None = None
    """Pace that its speed follows from, if that is known."""

    @property
    def rows(self) -> int:
        """Micro-batch that is configured."""
        return self.asked.batch(self.ranks).micro_batch

    @property
    def rounding(self) -> Rounding:
        """Sizes that a search may return."""
        settings = self.asked.settings
        # Rollouts keep the global batch in any case.
        divides = settings.keep_global_batch and not self.asked.kind.generates
        return "divisor" if divides else settings.rounding

    @property
    def question(self) -> Question:
        """What is asked of the config's steps."""
        step = (self.rows, self.length, self.asked.accumulation)
        return Question(self.device, *step, self.pace, confirmed=self.confirmed)

    @property
    def rows_per_step(self) -> int:
        """Rows of each rank in a step."""
        return self.rows * self.asked.accumulation

    def traces(self) -> Traces:
        """The config's steps: those that are remembered, and others as they are traced."""
        run = self.asked, self.ranks, self.rank
        return Traces(*run, self.may_trace, self.beside, self.device.before_ampere)

    def run(self, traces: Traces, any_length: bool = False) -> TracedRun:
        """The config's run, whose peaks follow from the traces."""
        searches = self.asked.settings.tries_sizes
        return TracedRun(traces, self.length, any_length, searches=searches)


def planned_rank(asked: Asked) -> int:
    """The rank that a plan stands for: the first of FSDP, whose share is the largest, and the last of those
    that split layers. Where their parts are uneven, it pads its part of the logits before they are gathered,
    which takes more than a smaller part saves."""
    return asked.holders - 1
