"""Take a step, and retry it when memory runs out: with more checkpointing, or in smaller micro-batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchtune_adaptive.common import TrainingOutOfMemory
from torchtune_adaptive.core.sizes.micro_batches import Computed, MicroBatch, MicroBatches
from torchtune_adaptive.core.sizes.recovery import Recovery
from torchtune_adaptive.core.sizes.split import Split
from torchtune_adaptive.core.step.knobs import CHECKPOINT, Choice
from torchtune_adaptive.core.step.snapshot import Generators
from torchtune_adaptive.core.step.switches import Switches
from torchtune_adaptive.core.step.train_step import StepHalfApplied, StepOutcome, TrainStep


class Rows(Protocol):
    """The rows of a step, which stay the same until ``advance``, in whatever micro-batches they come."""

    def step(self, rows: int, size: int) -> Iterator[MicroBatch]:
        """The next ``rows`` on each rank, in micro-batches of ``size``; see ``MicroBatches``."""

    def advance(self, rows: int) -> None:
        """The step is done."""


class Notices(Protocol):
    """Where changes of the micro-batch are told; see ``train.events``."""

    def changed(self, step: int, reason: str, **what: tuple[Any, Any]) -> None: ...

    def noticed(self, step: int, what: str) -> None: ...


class Phases(Protocol):
    """Where the main thread is, for those who watch over it; see ``ranks.watchdog``."""

    def enter(self, phase: str, patience: float | None) -> None: ...


@dataclass
class StepRunner:
    """Takes each step of training, as often as it takes, in micro-batches of the size that works.

    Every rank has one and sees the same outcomes, so all ranks decide the same without asking.

    Args:
        step: the step.
        micro_batches: how its rows are divided.
        make_recovery: what decides about taking less memory, given the batch and the number of reliefs that
            there are; gives None to stop when memory runs out.
        watchdog: notified of each step.
        step_timeout: seconds that a step may stand still.
        events: records what changes.
        advice: what to do where a step cannot be retried, for the message that ends the run.
        wait_for_memory: seconds to wait, in all, when not even the smallest micro-batch fits: memory may be
            short for a moment only, because of another process.
    """

    step: TrainStep
    micro_batches: MicroBatches
    make_recovery: Callable[[Split, int], Recovery | None]
    watchdog: Phases
    step_timeout: float
    events: Notices
    advice: Callable[[], str]
    wait_for_memory: float = 0.0

    recovery: Recovery | None = field(init=False, default=None)
    computed: list[Computed] = field(init=False, default_factory=list)
    """The micro-batches of the last step."""
    retried_steps: int = field(init=False, default=0)
    allocation_retries: int = field(init=False, default=0)
    _waited: float = field(init=False, default=0.0)
    """Seconds of waiting for memory in this step."""

    def __post_init__(self) -> None:
        self._reliefs = reliefs(self.step.options.switches)

    def begin(self, split: Split) -> None:
        """Use the full size of a batch from the next step on."""
        self._split = split
        self.recovery = self.make_recovery(split, len(self._reliefs) - 1)
        self._relieve()

    def _relieve(self) -> None:
        """Set the step's switches as the recovery says."""
        self.step.switch(self._reliefs[self.recovery.relief if self.recovery is not None else 0])

    @property
    def size(self) -> int:
        """The size of micro-batches right now; see ``MicroBatches``."""
        if self.recovery is not None:
            return self.recovery.size
        return self.micro_batches.full_size(self._split)

    def run(self, rows: Rows, number: int) -> StepOutcome:
        """Take the next step of an epoch.

        Args:
            rows: what it is taken with.
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

    def _attempt(self, rows: Rows, number: int) -> StepOutcome:
        self.computed = []
        try:
            for micro_batch in rows.step(self._split.rows, self.size):
                self.computed.append(self.micro_batches.computed(micro_batch))
                self.step.forward_backward(micro_batch.batch)
            return self.step.apply()
        except StepHalfApplied as half_applied:
            raise TrainingOutOfMemory(
                f"Out of memory in the {half_applied.phase} of step {number}: some parameters may have "
                f"changed and others not, so the step cannot be retried. {self.advice()}"
            ) from None

    def _in_what(self) -> str:
        return f" in micro-batches of {self.size} {self.micro_batches.unit}"

    def _shrink(self, outcome: StepOutcome, number: int) -> None:
        where = ", ".join(
            f"out of memory on rank {rank}, {phase}"
            for rank, phase in enumerate(outcome.failures)
            if phase
        )
        before, in_what = self._now(), self._in_what()
        # Where the optimizer ran out of memory, activations are gone, and so is what a relief would save.
        of_activations = {*outcome.failures} <= {None, "forward", "backward"}
        if self.recovery is not None and self._take_less(of_activations):
            self._changed(before, number, where)
        elif self.recovery is None or not self._wait(number, where):
            why = "; adaptive_batching.on_out_of_memory is raise" if self.recovery is None else ""
            raise TrainingOutOfMemory(f"Step {number}{in_what}: {where}{why}. {self.advice()}")

    def _take_less(self, of_activations: bool) -> bool:
        """Take less memory from now on, with the same bits if possible; False if there is no way."""
        assert self.recovery is not None
        return (of_activations and self.recovery.relieve()) or self.recovery.shrink()

    def _now(self) -> tuple[int, int]:
        return self.size, self.recovery.relief if self.recovery is not None else 0

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
        before = self._now()
        if self.recovery.is_thrashing(outcome.retries):
            reason = "allocation retries in two consecutive steps"
            if self._take_less(of_activations=True):
                self._changed(before, number + 1, reason)
            else:
                self.events.noticed(number + 1, f"{reason}, and the micro-batch cannot shrink")
        elif self.recovery.grow_back():
            self._changed(before, number + 1, f"no OOM for {self.recovery.waited} steps")

    def _changed(self, before: tuple[int, int], number: int, reason: str) -> None:
        (size, relief), (size_after, relief_after) = before, self._now()
        what: dict[str, tuple[Any, Any]] = {}
        if relief != relief_after:
            self._relieve()
            old = self._reliefs[relief]
            for key, value in self._reliefs[relief_after].items():
                if value != old[key]:
                    what[key.rpartition(".")[2]] = (old[key], value)
        if size != size_after:
            what |= self.micro_batches.change(size, size_after, self._split)
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
            "knobs": dict(self._reliefs[0]),
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
            self._relieve()


def reliefs(switches: Switches) -> list[Choice]:
    """The knobs as they are, and then with all layers computed again in backward, which changes no bit."""
    own = switches.choice
    more = own | {CHECKPOINT: "all"}
    # Not the loss as well: where memory runs out while it is computed again, torch 2.13 may keep the rest.
    relieves = CHECKPOINT in switches and more != own and more.is_possible()
    return [own, more] if relieves else [own]
