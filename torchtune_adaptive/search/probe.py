"""One trial: run the real step on the worst case, measure, agree, and leave no trace.

A trial is a step in the middle of a run: the optimizer's state exists, the gradients of an earlier
micro-batch exist if gradients accumulate, every row is as long as a row can be, and the optimizer steps.
Everything that it changes is restored, and everything that it allocates is freed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchtune_adaptive.device.memory import DeviceMemory
from torchtune_adaptive.errors import EmptyTrial, NothingFits
from torchtune_adaptive.ranks.agreement import Ranks
from torchtune_adaptive.search.context import SearchContext
from torchtune_adaptive.search.trial import RankReport, SizeTrial
from torchtune_adaptive.search.worst_case import WorstCase
from torchtune_adaptive.settings.adaptive import BLOCK
from torchtune_adaptive.step.snapshot import Snapshot
from torchtune_adaptive.step.train_step import StepHalfApplied, TrainStep

log = logging.getLogger(__name__)


class Probe:
    """Tries sizes on the run itself; a context, which ends with the run as it was at its beginning.

    Args:
        step: the step that training will use.
        batch: makes the worst-case batch of a number of rows.
        accumulation: the micro-batches in a step, for a given size.
        headroom: the share of memory that must stay free.
        ranks: the ranks of the run.
        entering: called with the name of each phase.
        compiled: whether the model is compiled, and forgets what it compiled between sizes.
    """

    def __init__(
        self,
        *,
        step: TrainStep,
        batch: Callable[[int], dict[str, Any]],
        accumulation: Callable[[int], int],
        headroom: float,
        ranks: Ranks,
        entering: Callable[[str], None],
        compiled: bool = False,
    ) -> None:
        self._step = step
        self._memory: DeviceMemory = step.memory
        self._batch = batch
        self._accumulation = accumulation
        self._headroom = headroom
        self._ranks = ranks
        self._entering = entering
        self._compiled = compiled

    def __enter__(self) -> Probe:
        self._snapshot = Snapshot(self._step.model, self._step.optimizers, self._step.device)
        return self

    def __exit__(self, *_: object) -> None:
        self._snapshot.close()
        self._step.forget()
        if self._compiled:
            torch.compiler.reset()

    def prime(self) -> SizeTrial:
        """Take two steps of one row: the optimizer creates its state, the device its workspaces, and the
        sequence of collectives is recorded and checked. Only then is the free memory available to rows."""
        self._entering("first steps of the search, of 1 row")
        capacity = self._memory.capacity()
        with self._memory.capped(capacity):
            trial = self._try(1, capacity)
            return self._try(1, capacity) if trial.fits else trial

    def trial(self, size: int) -> SizeTrial:
        """Try one size."""
        self._entering(f"trial of {size} rows")
        if self._compiled:
            # Compile for this size alone, as training will: dynamo would switch to dynamic shapes.
            torch.compiler.reset()
        self._memory.release()
        usable = int(self._memory.capacity() * (1 - self._headroom))
        with self._memory.capped(usable):
            trial = self._try(size, usable)
            # The first step may have had to clear up what the allocator had cut for other sizes.
            return self._try(size, usable) if trial.only_retried else trial

    def timed(self, what: str, micro_batches: Sequence[dict[str, Any]]) -> float | None:
        """Seconds of a step of these on the slowest rank; None if memory runs out on one."""
        self._entering(f"a step {what}")
        self._memory.release()
        with self._memory.capped(int(self._memory.capacity() * (1 - self._headroom))):
            started = time.perf_counter()
            failed_in = self._take_step(micro_batches)
            self._memory.synchronize()
            seconds = time.perf_counter() - started
            self._snapshot.restore()
        seen = self._ranks.gather((failed_in, seconds))
        return None if any(failed for failed, _ in seen) else max(seconds for _, seconds in seen)

    def _try(self, size: int, usable: int) -> SizeTrial:
        started = time.perf_counter()
        self._memory.watch()
        # From the second micro-batch on, gradients are there; more of them make no new peak.
        failed_in = self._take_step([self._batch(size)] * min(self._accumulation(size), 2))
        usage = self._memory.usage()
        self._snapshot.restore()
        report = RankReport(
            failed_in=failed_in,
            peak_bytes=usage.peak_bytes,
            peak_allocated_bytes=usage.peak_allocated_bytes,
            retries=usage.retries,
            usable_bytes=usable,
        )
        reports = tuple(self._ranks.gather(report))
        return SizeTrial(size, time.perf_counter() - started, reports)

    def _take_step(self, micro_batches: Sequence[dict[str, Any]]) -> str | None:
        """The phase in which this rank ran out of memory, if it did."""
        try:
            for batch in micro_batches:
                self._step.forward_backward(batch)
            outcome = self._step.apply()
        except StepHalfApplied as half_applied:
            self._step.forget()
            return half_applied.phase if half_applied.here else None
        if outcome.lost:
            return outcome.failures[self._ranks.rank]
        if outcome.tokens == 0:
            raise EmptyTrial(
                f"A trial of {len(micro_batches[0]['tokens'])} rows predicted no token, so it says nothing "
                "about memory. Check that the dataset's rows have two tokens or more, and that collate_fn "
                "keeps their labels."
            )
        return None


def probe_of(
    run: SearchContext,
    batch: Callable[[int], dict[str, Any]],
    accumulation: Callable[[int], int],
) -> Probe:
    """The probe of a run.

    Args:
        run: the run to search on.
        batch: makes the worst-case batch of a number of rows.
        accumulation: the micro-batches in a step, for a given size.
    """
    if run.compiled and run.step.device.type == "cpu":
        log.info(
            "The simulated device sees single operations, so compiled regions run eager in trials."
        )
    # How long a rank compiles cannot be bounded.
    patience = None if run.compiled else run.settings.rank_timeout
    return Probe(
        step=run.step,
        batch=batch,
        accumulation=accumulation,
        headroom=run.settings.headroom,
        ranks=run.ranks,
        entering=lambda phase: run.watchdog.enter(phase, patience=patience),
        compiled=run.compiled,
    )


def nothing_fits(trial: SizeTrial, worst: WorstCase) -> NothingFits:
    """Why not even one row can be trained, and what would change that."""
    failed = trial.deciding
    return NothingFits(
        f"Not even {trial.size} row of {worst.length} tokens ({worst.source}) fits: {failed.trouble} on rank "
        f"{trial.deciding_rank}, which needed more than {failed.peak_bytes:,} bytes and may use "
        f"{failed.usable_bytes:,}. Shorten the rows (tokenizer.max_seq_len), turn on "
        "enable_activation_checkpointing, use LoRA or QLoRA, use more ranks, or allow more memory "
        f"({BLOCK}.memory_limit, {BLOCK}.headroom)."
    )
