"""Take a step, and retry it when memory runs out: with more checkpointing, or in smaller micro-batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any

from torchtune_adaptive.common import RankLost, TrainingOutOfMemory, counted
from torchtune_adaptive.core.device.memory import is_out_of_memory
from torchtune_adaptive.core.sizes.recovery import Recovery, next_wait
from torchtune_adaptive.core.step.exchange import StepDone, StepLost, StepOutcome
from torchtune_adaptive.core.step.failures import StepHalfApplied
from torchtune_adaptive.core.step.generators import Generators
from torchtune_adaptive.core.step.knobs import CHECKPOINT, Choice
from torchtune_adaptive.core.step.objective import Batch
from torchtune_adaptive.core.step.train_step import TrainStep


@dataclass(frozen=True)
class Adjustment:
    """A change in the memory that steps take. If nothing changes, the reason says why."""

    step: int
    """The first step that it concerns, counted from 1."""
    reason: str
    size: tuple[int, int]
    """The size of micro-batches, before and after."""
    knobs: dict[str, tuple[Any, Any]]
    """The memory knobs that change, each before and after."""
    wait: float = 0.0
    """Seconds to wait for memory before the step is retried."""


@dataclass
class StepRunner:
    """Takes each step of training, as often as it takes, in micro-batches of the size that works.

    Every rank has one and sees the same outcomes, so all ranks decide the same without asking.
    """

    step: TrainStep
    advice: Callable[[], str]
    """Advice for the message that ends the run where a step cannot be retried."""
    unit: str = "row"
    """The thing that the size of a micro-batch counts."""
    wait_for_memory: float = 0.0
    """Seconds to wait, in all, when not even the smallest micro-batch fits: memory may be short for a moment
    only, because of another process."""

    recovery: Recovery | None = field(init=False, default=None)
    reliefs: list[Choice] = field(init=False)
    """The memory knobs as they are at the beginning, and then with all layers computed again in backward."""
    retried_steps: int = field(init=False, default=0)
    allocation_retries: int = field(init=False, default=0)
    _size: int = field(init=False, default=0)
    _relief_works: bool = field(init=False, default=False)
    """Whether a step has been done with a relief. Until then it may be what a model cannot do."""
    _waited: float = field(init=False, default=0.0)
    """Seconds of waiting for memory in this step."""

    def __post_init__(self) -> None:
        self.follow_switches()

    def follow_switches(self) -> None:
        """Take the step's memory knobs, as they are now, for those of the beginning."""
        switches = self.step.options.switches
        own, more = switches.choice, switches.choice | {CHECKPOINT: "all"}  # which changes no bit
        # Not the loss too: where memory runs out while it is computed again, torch 2.13 may keep the rest.
        relieves = CHECKPOINT in switches and more != own and more.is_possible()
        self.reliefs = [own, more] if relieves else [own]

    def begin(self, size: int, recovery: Recovery | None) -> None:
        """Use micro-batches of this size from the next step on.

        ``recovery`` decides about taking less memory; without it, running out of memory ends training.
        """
        self._size, self.recovery = size, recovery
        self._relieve()

    def _relieve(self) -> None:
        """Set the step's switches as the recovery says."""
        choice = self.reliefs[self._now()[1]]
        self.step.switch(choice)
        self.step.recomputes = choice.get(CHECKPOINT, "none") != "none"

    @property
    def size(self) -> int:
        """The size of micro-batches right now."""
        return self._now()[0]

    @property
    def relieved(self) -> dict[str, tuple[Any, Any]]:
        """The memory knobs that are not as they were at the beginning, each before and now."""
        return _changes(self.reliefs[0], self.reliefs[self._now()[1]])

    def _now(self) -> tuple[int, int]:
        recovery = self.recovery
        return (self._size, 0) if recovery is None else (recovery.size, recovery.relief)

    def run(
        self,
        micro_batches: Callable[[int], Iterable[Batch]],
        number: int,
        adjusted: Callable[[Adjustment], None] = lambda adjustment: None,
    ) -> StepDone:
        """Take a step.

        Args:
            micro_batches: makes the micro-batches of the step, given their size; called for each attempt. If
                they have a length, it is known which is the last.
            number: the number of the step, counted from 1.
            adjusted: called with what is done about memory, before the next attempt.

        Raises:
            TrainingOutOfMemory: the step cannot be retried, or not any smaller.
        """
        # Dropout is part of the step: a retry draws the same random numbers.
        generators = Generators(self.step.device) if self.recovery is not None else None
        kept = self.step.kept_buffers("step")
        self._waited = 0.0
        outcome = self._attempt(micro_batches, number)
        while isinstance(outcome, StepLost):
            kept.restore()  # first: that layers are checkpointed, or not, is an attribute of theirs
            adjustment = self._adjust(outcome, number)
            if outcome.error:
                self.reliefs = self.reliefs[:1]
            if adjustment.knobs:  # the attributes that it has set are not to be set back
                kept = self.step.kept_buffers("step")
            adjusted(adjustment)
            if adjustment.wait:
                time.sleep(adjustment.wait)
                self.step.memory.release()
            self.retried_steps += 1
            if generators is not None:
                generators.restore()
            outcome = self._attempt(micro_batches, number)
        kept.learn()
        self.allocation_retries += outcome.retries
        self._relief_works |= self._now()[1] > 0
        if (learned := self._learn(outcome.retries, number + 1)) is not None:
            adjusted(learned)
        return outcome

    def _attempt(self, micro_batches: Callable[[int], Iterable[Batch]], number: int) -> StepOutcome:
        self.step.survive_errors(self._now()[1] > 0 and not self._relief_works)
        try:
            batches = micro_batches(self.size)
            number_of_them = length_hint(batches)
            for position, batch in enumerate(batches, 1):
                self.step.forward_backward(batch, last=position == number_of_them)
            return self.step.apply()
        except StepHalfApplied as half_applied:
            raise TrainingOutOfMemory(
                f"Out of memory in the {half_applied.stage} of step {number}: some parameters may have "
                f"changed and others not, so the step cannot be retried. {self.advice()}",
                half_applied.everywhere,
            ) from None
        except RankLost:
            raise  # no step follows; and to wait for the device would be to wait for that rank
        except BaseException as error:  # of the caller's own functions, or from the keyboard
            if not self.step.options.survive and is_out_of_memory(error):
                raise self._without_recovery(error, number) from error
            try:
                self.step.abandon()
            except Exception as after:
                error.add_note(f"After it, no other step can be taken: {after}")
            raise

    def _without_recovery(self, error: BaseException, number: int) -> TrainingOutOfMemory:
        """The error that ends the run on this rank; the others do not know of it, and wait."""
        ranks, stage = self.step.ranks, self.step.stage
        where = StepLost(tuple(stage if r == ranks.rank else None for r in range(ranks.size)))
        said = " ".join(str(error).split())
        return TrainingOutOfMemory(
            f"{self._attempted(number)}: {where.trouble}. {self.advice()} ({said})",
            everywhere=False,
        )

    def _attempted(self, number: int) -> str:
        return f"Step {number} in micro-batches of {counted(self.size, self.unit)}"

    def _adjust(self, outcome: StepLost, number: int) -> Adjustment:
        """Take less memory in the next attempt or, where that is not possible, wait for it."""
        before, where = self._now(), outcome.trouble
        # Where the optimizer ran out of memory, activations are gone, and so is what a relief would save.
        of_activations = {*outcome.failures} <= {None, "forward", "backward"}
        if self.recovery is not None and (
            self.recovery.drop_reliefs() if outcome.error else self._take_less(of_activations)
        ):
            return self._adjustment(before, number, where)
        seconds = next_wait(self._waited, self.wait_for_memory)
        if self.recovery is None or seconds <= 0:
            raise TrainingOutOfMemory(f"{self._attempted(number)}: {where}. {self.advice()}")
        self._waited += seconds
        reason = f"{where}, at the smallest size: retrying in {seconds:g} s"
        return self._adjustment(before, number, reason, seconds)

    def _take_less(self, of_activations: bool) -> bool:
        """Take less memory from now on, with the same bits if possible; False if there is no way."""
        assert self.recovery is not None
        return (of_activations and self.recovery.relieve()) or self.recovery.shrink()

    def _learn(self, retries: int, number: int) -> Adjustment | None:
        """Decide about the next step by the allocation retries of the last one."""
        if self.recovery is None:
            return None
        before = self._now()
        if self.recovery.is_thrashing(retries):
            reason = "allocation retries in two consecutive steps"
            if not self._take_less(of_activations=True):
                reason += ", and the micro-batch cannot shrink"
        elif self.recovery.grow_back():
            reason = f"no OOM for {counted(self.recovery.waited, 'step')}"
        else:
            return None
        return self._adjustment(before, number, reason)

    def _adjustment(
        self, before: tuple[int, int], number: int, reason: str, wait: float = 0.0
    ) -> Adjustment:
        (size, relief), (size_after, relief_after) = before, self._now()
        if relief != relief_after:
            self._relieve()
        changes = _changes(self.reliefs[relief], self.reliefs[relief_after])
        knobs = {key.rpartition(".")[2]: change for key, change in changes.items()}
        return Adjustment(number, reason, (size, size_after), knobs, wait)

    def state_dict(self) -> dict[str, Any]:
        return {
            "knobs": dict(self.reliefs[0]),
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


def _changes(before: Choice, after: Choice) -> dict[str, tuple[Any, Any]]:
    return {key: (before[key], value) for key, value in after.items() if value != before[key]}
