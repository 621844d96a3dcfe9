"""One trial: run the real step on the worst case, measure, agree, and leave no trace.

A trial is a step in the middle of a run: the optimizer's state exists, the gradients of an earlier
micro-batch exist if gradients accumulate, every row is as long as a row can be, and the optimizer steps.
Everything that it changes is restored, and everything that it allocates is freed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torchtune_adaptive.common import EmptyTrial, RankLost, counted
from torchtune_adaptive.core.search.trial import RankReport, SizeTrial
from torchtune_adaptive.core.step.exchange import StepDone
from torchtune_adaptive.core.step.failures import StepHalfApplied
from torchtune_adaptive.core.step.phase import Phase
from torchtune_adaptive.core.step.snapshot import Snapshot
from torchtune_adaptive.core.step.train_step import TrainStep

BatchMaker = Callable[[int], Any]
"""Makes the worst-case batch of a number of rows."""
Attempt = Callable[[Sequence[dict[str, Any]]], str | None]
"""Computes micro-batches; gives the stage in which this rank ran out of memory, if it did."""


@dataclass(kw_only=True, eq=False, repr=False)
class Probe:
    """Tries sizes on the run itself; a context, which ends with the run as it was at its beginning."""

    step: TrainStep
    accumulation: Callable[[int], int]
    """The micro-batches in a step, for a given size."""
    headroom: float
    """The share of the capacity that must stay free."""
    entering: Callable[[str], None]
    """Function called with the name of each activity."""
    observe: Callable[[int, StepDone], None] = lambda size, outcome: None
    """Function called with the size and the outcome of each trial's step that was not lost."""

    def __enter__(self) -> Probe:
        step = self.step
        others = step.objective.frozen
        self._snapshot = Snapshot(step.model, step.optimizers, step.device, others)
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._snapshot.close()
        if not isinstance(error, RankLost):  # for which the device may wait
            self.step.abandon()
        if self.step.options.compiled:
            torch.compiler.reset()

    def prime(self, batch: BatchMaker) -> SizeTrial:
        """Take two steps of one row: the optimizer creates its state, the device its workspaces, and the
        sequence of collectives is recorded and checked. Only then is what remains free there for rows."""
        self.entering("first steps of the search, of 1 row")
        capacity = self.step.memory.capacity()
        with self.step.memory.capped(capacity):
            trial = self._try(1, capacity, self._step_of(1, batch), self._take_step)
            if trial.fits:
                trial = self._try(1, capacity, self._step_of(1, batch), self._take_step)
            return trial

    def trial(self, size: int, batch: BatchMaker) -> SizeTrial:
        """Try one size."""
        self.entering(f"trial of {counted(size, 'row')}")
        return self._trial(size, self._step_of(size, batch), self._take_step)

    def trial_of(self, phase: Phase[Any, Any], size: int, rows: Any) -> SizeTrial:
        """Try a micro-batch of another phase."""

        def attempt(micro_batches: Sequence[Any]) -> str | None:
            outcome = phase.attempt(*micro_batches)
            return outcome.failures[self.step.ranks.rank] if outcome.lost else None

        self.entering(f"trial of {counted(size, 'row')} in {phase.name}")
        return self._trial(size, [rows], attempt)

    def timed(
        self, what: str, micro_batches: Sequence[dict[str, Any]], steps: int = 1
    ) -> list[float] | None:
        """Seconds of each of some steps on the slowest rank; None if memory runs out on one.

        They follow one that is not counted, in which the device gets its memory and loads its kernels, and up
        to two more where collectives are recorded for each shape, which takes time.
        """
        self.entering(f"a step {what}")
        self.step.memory.release()
        seconds: list[float] = []
        with self.step.memory.capped(self._usable()):
            failed_in = self._take_step(micro_batches)
            for _ in range(2):  # on any rank: they may have rows of other lengths
                if self.step.ranks.any(self.step.collectives.was_recorded):
                    failed_in = self._take_step(micro_batches) or failed_in
            for _ in range(steps):
                started = self.step.memory.clock()
                failed_in = self._take_step(micro_batches) or failed_in
                seconds.append(self.step.memory.clock() - started)
        self._snapshot.restore()  # only now: how long a step takes does not depend on values
        seen = self.step.ranks.gather((failed_in, seconds))
        if any(failed for failed, _ in seen):
            return None
        return [max(each) for each in zip(*(seconds for _, seconds in seen), strict=True)]

    def _usable(self) -> int:
        return int(self.step.memory.capacity() * (1 - self.headroom))

    def _step_of(self, size: int, batch: BatchMaker) -> list[Any]:
        # From the second micro-batch on, gradients are there; more of them make no new peak. Where the last
        # one alone reduces them, they are added to before that, too.
        return [batch(size)] * min(self.accumulation(size), self.step.takes_as_much_from)

    def _trial(
        self, size: int, micro_batches: Sequence[dict[str, Any]], attempt: Attempt
    ) -> SizeTrial:
        if self.step.options.compiled:
            # Compile for this size alone, as training will: dynamo would switch to dynamic shapes.
            torch.compiler.reset()
        self.step.memory.release()
        usable = self._usable()
        with self.step.memory.capped(usable):
            trial = self._try(size, usable, micro_batches, attempt)
            for _ in range(2):  # where collectives follow the shape, they are recorded in two steps
                if trial.fits and self.step.collectives.was_recorded:
                    trial = self._try(size, usable, micro_batches, attempt)
            # The first step may have had to clear up what the allocator had cut for other sizes.
            return self._try(size, usable, micro_batches, attempt) if trial.only_retried else trial

    def _try(
        self, size: int, usable: int, micro_batches: Sequence[dict[str, Any]], attempt: Attempt
    ) -> SizeTrial:
        started = time.perf_counter()
        self.step.memory.watch()
        failed_in = attempt(micro_batches)
        self.step.memory.synchronize()
        usage = self.step.memory.usage()  # before restoring, which takes memory, too
        self._snapshot.restore()
        report = RankReport(**asdict(usage), failed_in=failed_in, usable_bytes=usable)
        reports = tuple(self.step.ranks.gather(report))
        return SizeTrial(size, time.perf_counter() - started, reports)

    def _take_step(self, micro_batches: Sequence[dict[str, Any]]) -> str | None:
        """The stage in which this rank ran out of memory, if it did."""
        try:
            for number, batch in enumerate(micro_batches, 1):
                self.step.forward_backward(batch, last=number == len(micro_batches))
            outcome = self.step.apply(trial=True)
        except StepHalfApplied as half_applied:
            self.step.forget()
            return half_applied.stage if half_applied.here else None
        if outcome.lost:
            return outcome.failures[self.step.ranks.rank]
        if outcome.weight == 0:
            rows = counted(self.step.rows(micro_batches[0]), "row")
            raise EmptyTrial(
                f"A trial of {rows} predicted no token, so it says nothing about memory. Check that the "
                "dataset's rows have two tokens or more, and that collate_fn keeps their labels."
            )
        self.observe(self.step.rows(micro_batches[0]), outcome)
        return None
