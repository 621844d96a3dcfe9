"""Take a step, and retry it with smaller micro-batches when memory runs out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchtune_adaptive.batching.recovery import Recovery
from torchtune_adaptive.batching.split import Split
from torchtune_adaptive.data.loader import EpochRows
from torchtune_adaptive.data.micro_batches import Computed, MicroBatches
from torchtune_adaptive.errors import TrainingOutOfMemory
from torchtune_adaptive.ranks.watchdog import Watchdog
from torchtune_adaptive.settings.adaptive import BLOCK
from torchtune_adaptive.step.snapshot import Generators
from torchtune_adaptive.step.train_step import StepHalfApplied, StepOutcome, TrainStep
from torchtune_adaptive.train.events import Events

_ADVICE = (
    f"Resume from it with a larger {BLOCK}.headroom, a smaller {BLOCK}.ceiling or batch_size, "
    "enable_activation_checkpointing, or shorter rows (tokenizer.max_seq_len)."
)


@dataclass
class StepRunner:
    """Takes each step of training, as often as it takes, in micro-batches of the size that works.

    Every rank has one and sees the same outcomes, so all ranks decide the same without asking.

    Args:
        step: the step.
        micro_batches: how its rows are divided.
        make_recovery: what decides about smaller micro-batches; gives None to stop when memory runs out.
        watchdog: notified of each step.
        step_timeout: seconds that a step may stand still.
        events: records what changes.
        last_checkpoint: names the newest checkpoint, for the message that ends the run.
        wait_for_memory: seconds to wait, in all, when not even the smallest micro-batch fits: memory may be
            short for a moment only, because of another process.
    """

    step: TrainStep
    micro_batches: MicroBatches
    make_recovery: Callable[[Split], Recovery | None]
    watchdog: Watchdog
    step_timeout: float
    events: Events
    last_checkpoint: Callable[[], str]
    wait_for_memory: float = 0.0

    recovery: Recovery | None = field(init=False, default=None)
    computed: list[Computed] = field(init=False, default_factory=list)
    """The micro-batches of the last step."""
    retried_steps: int = field(init=False, default=0)
    allocation_retries: int = field(init=False, default=0)
    _waited: float = field(init=False, default=0.0)
    """Seconds of waiting for memory in this step."""

    def begin(self, split: Split) -> None:
        """Use the full size of a batch from the next step on."""
        self._split = split
        self.recovery = self.make_recovery(split)

    @property
    def size(self) -> int:
        """The size of micro-batches right now; see ``MicroBatches``."""
        if self.recovery is not None:
            return self.recovery.size
        return self.micro_batches.full_size(self._split)

    def run(self, rows: EpochRows, number: int) -> StepOutcome:
        """Take the next step of an epoch.

        Args:
            rows: the samples of the epoch.
            number: of the step, counted from 1.

        Raises:
            TrainingOutOfMemory: the step cannot be retried, or not any smaller.
        """
        # Dropout is part of the step: a retry draws the same random numbers.
        generators = Generators(self.step.device) if self.recovery is not None else None
        self._waited = 0.0
        while True:
            self.watchdog.enter(f"step {number}{self._in_what()}", self.step_timeout)
            outcome = self._attempt(rows, number)
            if not outcome.lost:
                rows.advance(self._split.rows)
                self._learn(outcome, number)
                return outcome
            self._shrink(outcome, number)
            self.retried_steps += 1
            if generators is not None:
                generators.restore()

    def _attempt(self, rows: EpochRows, number: int) -> StepOutcome:
        self.computed = []
        try:
            for micro_batch in rows.step(self._split.rows, self.size):
                shape = micro_batch.batch["tokens"].shape
                self.computed.append(Computed(micro_batch.sample_ids, *shape))
                self.step.forward_backward(micro_batch.batch)
            return self.step.apply()
        except StepHalfApplied as half_applied:
            raise TrainingOutOfMemory(
                f"Out of memory in the {half_applied.phase} of step {number}: some parameters may have "
                "changed and others not, so the step cannot be retried. The last checkpoint: "
                f"{self.last_checkpoint()}. {_ADVICE}"
            ) from None

    def _in_what(self) -> str:
        return f" in micro-batches of {self.size} {self.micro_batches.unit}"

    def _shrink(self, outcome: StepOutcome, number: int) -> None:
        where = ", ".join(
            f"out of memory on rank {rank}, {phase}"
            for rank, phase in enumerate(outcome.failures)
            if phase
        )
        before, in_what = self.size, self._in_what()
        if self.recovery is not None and self.recovery.shrink():
            self._changed(before, number, where)
        elif self.recovery is None or not self._wait(number, where):
            why = f"; {BLOCK}.on_out_of_memory is raise" if self.recovery is None else ""
            raise TrainingOutOfMemory(
                f"Step {number}{in_what}: {where}{why}. The last checkpoint: {self.last_checkpoint()}. "
                f"{_ADVICE}"
            )

    def _wait(self, number: int, where: str) -> bool:
        """Wait for memory, each time as long as in all before; False if that has been long enough."""
        seconds = min(max(1.0, self._waited), self.wait_for_memory - self._waited)
        if seconds <= 0:
            return False
        self._waited += seconds
        self.events.noticed(number, f"{where}, at the smallest size: retrying in {seconds:g} s")
        self.watchdog.enter(f"step {number}, waiting for memory", patience=None)
        time.sleep(seconds)
        self.step.memory.release()
        return True

    def _learn(self, outcome: StepOutcome, number: int) -> None:
        """Decide about the next step by what this one took."""
        self.allocation_retries += outcome.retries
        if self.recovery is None:
            return
        before = self.size
        if self.recovery.is_thrashing(outcome.retries):
            reason = "allocation retries in two consecutive steps"
            if self.recovery.shrink():
                self._changed(before, number + 1, reason)
            else:
                self.events.noticed(number + 1, f"{reason}, and the micro-batch cannot shrink")
        elif self.recovery.grow_back():
            self._changed(before, number + 1, f"no OOM for {self.recovery.waited} steps")

    def _changed(self, before: int, number: int, reason: str) -> None:
        what = self.micro_batches.change(before, self.size, self._split)
        self.events.changed(number, reason, **what)

    def metrics(self) -> dict[str, float]:
        """How training copes with its memory, and how the last step was divided."""
        found = self.micro_batches.metrics(self.computed)
        if self.recovery is not None:
            found["retried_steps"] = self.retried_steps
            found["alloc_retries"] = self.allocation_retries
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "recovery": self.recovery.state_dict() if self.recovery else None,
            "retried_steps": self.retried_steps,
            "allocation_retries": self.allocation_retries,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was called."""
        self.retried_steps = state["retried_steps"]
        self.allocation_retries = state["allocation_retries"]
        if self.recovery is not None and state["recovery"] is not None:
            self.recovery.load_state_dict(state["recovery"])
