"""The batches of a loader, with rows as the micro-batches of a step need them.

The processes that load data also collate, so that is where micro-batches are best made. Each makes what is
in its batch. So where a micro-batch has the rows of several batches, one of these gets them, and the others
none: a loader yields as many batches as before, and those of a step have its rows, in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from torchtune_adaptive.integrations import private
from torchtune_adaptive.integrations.rows import Keeping, KeptRows
from torchtune_adaptive.integrations.step_rows import sampled_by


class StepBatches:
    """The batch sampler of a process, whose batches have whole micro-batches of ``keeping.size`` rows.

    Args:
        batches: the batch sampler that it had, in whose batches all rows but the last are ``rows`` each.
        of_step: the batches of a step.
        workers: the processes that load data, which take batches in turn.
    """

    def __init__(
        self, batches: Any, keeping: Keeping, rows: int, of_step: int, workers: int
    ) -> None:
        self._batches, self._keeping = batches, keeping
        self._rows, self._of_step, self._workers = rows, of_step, max(1, workers)

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)  # accelerate looks for the sampler, to set its epoch

    def __iter__(self) -> Iterator[list[int]]:
        batches, yielded, busy = iter(self._batches), 0, 0
        while True:
            size = self._keeping.size
            if size in (0, self._rows):
                one = next(batches, None)
                if one is None:
                    return
                yield one
                # The size may change with the next step only.
                yield from islice(batches, self._of_step - 1)
                yielded += self._of_step
                continue
            step = list(islice(batches, self._of_step))
            if not step:
                return
            if len(step[-1]) == self._rows:
                rows = [row for batch in step for row in batch]
                parts = [rows[start : start + size] for start in range(0, len(rows), size)]
                step = self._spread(parts, len(step), yielded, busy)
                busy += len(parts)
            yield from step
            yielded += len(step)

    def _spread(
        self, parts: Sequence[list[int]], batches: int, yielded: int, busy: int
    ) -> list[list[int]]:
        """Micro-batches in so many batches, in order; where some stay empty, processes take turns."""
        count = len(parts)
        if count >= batches:
            ends = [number * count // batches for number in range(batches + 1)]
            return [[*chain(*parts[a:b])] for a, b in pairwise(ends)]
        spread: list[list[int]] = [[] for _ in range(batches)]
        start = 0
        for number, part in enumerate(parts):
            places = range(start, batches - (count - number) + 1)
            turn = (busy + number - yielded) % self._workers
            place = next((at for at in places if at % self._workers == turn), start)
            spread[place], start = part, place + 1
        return spread


def divide(loader: Any, rows: int, of_step: int, larger: bool) -> bool:
    """Let a loader divide steps by the size of its ``Keeping``; whether it can. accelerate may be around it.

    Not where its batches are chosen otherwise than by their number of rows, or where none cannot be loaded;
    nor where batches come in any order, as those of a step then need not belong together.

    Args:
        rows: those of a batch.
        of_step: the batches of a step.
        larger: whether a micro-batch may have rows of several batches. The loader then stays ahead
            by one step more than it has processes, so that each has a micro-batch to make.
    """
    base, batches, inner = sampled_by(loader)
    keeping = Keeping.of(base)
    if type(base) is not DataLoader or type(inner) is not BatchSampler or inner.batch_size != rows:
        return False
    if getattr(batches, "split_batches", False) or not _loads_nothing(base.dataset):
        return False
    if keeping is None or not base.in_order:
        return False
    if larger and base.num_workers:
        ahead = of_step + -(-of_step // base.num_workers)
        base.prefetch_factor = max(base.prefetch_factor or 0, ahead)
    private.replace_batch_sampler(
        base, lambda batches: StepBatches(batches, keeping, rows, of_step, base.num_workers)
    )
    return True


def _loads_nothing(dataset: Any) -> bool:
    """Whether no rows can be loaded, too."""
    load = getattr(dataset, "__getitems__", None)
    try:
        return load is None or list(load([])) == []
    except Exception:  # of anybody's code
        return False


def counted_in(batch: KeptRows, other: Any) -> Any:
    """What the trainer counts tokens in: those of a batch, however many micro-batches that has; ``other`` is
    a micro-batch of the same step."""
    made = [inputs for _, inputs in batch.made]
    if len(made) == 1:
        return made[0]
    return {
        name: torch.cat(
            # Not all need have it, as where some rows have images.
            [value.flatten()[:0], *(one[name].flatten() for one in made if name in one)]
        )
        for name, value in other.items()
        if isinstance(value, torch.Tensor)
    }
