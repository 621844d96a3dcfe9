"""Phases of a run besides training, such as scoring: rows go through in micro-batches that fit.

    score = Phase("scoring", step, log_probs)
    score.begin(size)
    found = score.of_rows(rows)

When memory runs out, only the micro-batch in which it did is done again, as smaller ones. What is done stays
done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from torch import nn

from torchtune_adaptive.common import TrainingOutOfMemory
from torchtune_adaptive.core.sizes.recovery import Recovery, next_wait
from torchtune_adaptive.core.step.exchange import ForwardDone, StepLost
from torchtune_adaptive.core.step.train_step import TrainStep
from torchtune_adaptive.core.step.trees import shape_of

P = TypeVar("P")
R = TypeVar("R")

Divide = Callable[[int, int], Iterable[Sequence[int]]]
"""A function that gives the positions of the rows in each micro-batch, on every rank as many in each. Its
arguments are the number of rows to leave out, which it gave first before, and the size."""


@dataclass(eq=False, repr=False)
class Phase(Generic[P, R]):
    """Work without gradients on any number of rows, the same on every rank, between steps."""

    name: str
    """The name in messages."""
    step: TrainStep
    work: Callable[[P], R]
    """What is done with a micro-batch: function of its rows. Nothing that it returns should be on the device,
    where it would take memory from what follows."""
    gathers: nn.Module | None = None
    """A sharded model of which each rank gathers all parameters first, if they fit. Then ``work`` launches
    nothing, so ranks need not do the same, and run out of memory by themselves."""
    sharded: Callable[[P], R] | None = None
    """What is done in place of ``work`` if they do not fit; launches the same on all ranks."""
    tried: Callable[[P], Any] | None = None
    """What a trial does in place of ``work``, with as much memory in less time."""
    shape: Callable[[P], Hashable] = shape_of
    """The shape of a micro-batch; where layers are split, it decides what is launched."""
    adjusted: Callable[[str, int, int], None] = lambda reason, before, after: None
    """Function called with the reason when micro-batches change from one size to another."""
    wait_for_memory: float = 0.0
    """Seconds to wait, in all, where not even one row fits: another process may be the cause."""
    advice: str = ""
    """Advice for the message where not even one row fits."""

    _recovery: Recovery = field(init=False)

    def begin(
        self, size: int, grow_back_after: int | None = None, smaller: Iterable[int] | None = None
    ) -> None:
        """Use micro-batches of this size from now on, and smaller ones when memory runs out.

        Args:
            size: the rows in a micro-batch, or whatever those who divide rows take it to be.
            grow_back_after: runs without trouble after which a size that failed is tried again; None: never.
            smaller: the sizes that it may shrink to; by default a half, and so on to 1.
        """
        if smaller is None:
            smaller = (size >> n for n in range(1, size.bit_length()))
        self._recovery = Recovery(size, smaller, grow_back_after)

    @property
    def size(self) -> int:
        """The size of micro-batches right now."""
        return self._recovery.size

    def state_dict(self) -> dict[str, Any]:
        return self._recovery.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was called, if that was after the same ``begin``."""
        self._recovery.load_state_dict(state)

    def of_rows(
        self: Phase[Any, Sequence[R]],
        rows: Sequence[Any],
        divide: Divide | None = None,
        made: Callable[[list[Any]], Any] = list,
    ) -> list[R]:
        """The result of each row; every rank has equally many rows.

        Args:
            rows: the rows of this rank.
            divide: how they are divided; by default, a micro-batch has as many rows as its size says.
            made: function that makes a micro-batch of some rows.
        """
        order: list[int] = []

        def portions(done: int, size: int) -> Iterator[tuple[int, Any]]:
            del order[done:]  # what has failed
            in_turn = (range(at, min(at + size, len(rows))) for at in range(done, len(rows), size))
            for part in divide(done, size) if divide else in_turn:
                order.extend(part)
                yield len(part), made([rows[position] for position in part])

        results = [each for done in self.run(len(rows), portions) for each in done.result]
        by_position = dict(zip(order, results, strict=True))
        return [by_position[position] for position in range(len(rows))]

    def run(
        self, rows: int, portions: Callable[[int, int], Iterable[tuple[int, P]]]
    ) -> Iterator[ForwardDone[R]]:
        """Do the work, a micro-batch at a time.

        Args:
            rows: the number of rows, the same on every rank.
            portions: function that makes micro-batches, each after the number of its rows. Its arguments are
                those of ``Divide``.

        Raises:
            TrainingOutOfMemory: not even one row fits.
        """
        with self._attempts(self.work, self.sharded, self._stay_sharded) as attempt:
            done, waited = 0, 0.0
            while done < rows:
                size, lost = self.size, None
                for number, portion in portions(done, size):
                    outcome = attempt(portion)
                    if outcome.lost:
                        lost = outcome
                        break
                    done += number
                    yield outcome
                if lost is not None:
                    waited += self._shrink(lost, waited)
        before = self.size
        if self._recovery.grow_back():
            self.adjusted("no OOM since", before, self.size)

    def _shrink(self, lost: StepLost, waited: float) -> float:
        """Take less memory or, where that is not possible, wait for it; gives the seconds of waiting."""
        before = self.size
        if self._recovery.shrink():
            self.adjusted(lost.trouble, before, self.size)
            return 0.0
        trouble = f"{lost.trouble}, with a single row"
        if (seconds := next_wait(waited, self.wait_for_memory)) <= 0:
            said = f"{trouble}. {self.advice}".strip()
            raise TrainingOutOfMemory(said, everywhere=self.gathers is None)
        self.adjusted(f"{trouble}: retrying in {seconds:g} s", before, before)
        time.sleep(seconds)
        self.step.memory.release()
        return seconds

    def _stay_sharded(self, lost: StepLost) -> None:
        """Use the smallest size of any rank: from here on, all take as many micro-batches."""
        before, least = self.size, self.step.ranks.spread(self.size)[0]
        while self.size > least:
            self._recovery.shrink()
        self.adjusted(f"{lost.trouble}: parameters stay sharded", before, self.size)

    def attempt(self, portion: P) -> ForwardDone[Any] | StepLost:
        """Try one micro-batch."""
        work, sharded = self.tried or self.work, self.tried or self.sharded
        with self._attempts(work, sharded, lambda lost: None) as attempt:
            return attempt(portion)

    @contextmanager
    def _attempts(
        self,
        work: Callable[[P], Any],
        sharded: Callable[[P], Any] | None,
        staying_sharded: Callable[[StepLost], None],
    ) -> Iterator[Callable[[P], ForwardDone[Any] | StepLost]]:
        """A context in which micro-batches can be done; gives what attempts one."""
        if self.gathers is None:
            yield partial(self._together, work)
            return
        with self.step.gathered(self.gathers) as gathered:
            if not gathered.lost:
                yield lambda portion: self.step.alone(self.name, partial(work, portion))
                return
        if sharded is None:
            yield lambda portion: gathered
            return
        staying_sharded(gathered)
        yield partial(self._together, sharded)

    def _together(self, work: Callable[[P], Any], portion: P) -> ForwardDone[Any] | StepLost:
        return self.step.forward_only(
            self.name, partial(work, portion), partial(self.shape, portion)
        )
