"""The batches of a program: made as it makes them, of as many rows as are asked for, of the longest."""

from __future__ import annotations

import copy
import inspect
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from math import lcm
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner.programs.data import LONGEST, LongestRows
from torchtune_adaptive.planner.programs.imports import WhenImported, put
from torchtune_adaptive.planner.programs.private import of_fetchers
from torchtune_adaptive.planner.programs.request import Seen
from torchtune_adaptive.planner.programs.steps import ProgramSteps

_LOOKED_AT, _SECONDS = 256, 5.0
"""Rows of a dataset among which the longest is looked for, and how long."""
_IN_THIS_PROCESS = {
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "multiprocessing_context": None,
    "timeout": 0,
    "pin_memory": False,
}
_TOKENS = "input_ids"


class LongestBatches:
    """Makes the batches of a program's loaders; ``rows`` and ``length``, if given, are those of each. Rows
    that are made up are all as long as may be, so that it is known how many are packed into one."""

    def __init__(
        self, steps: ProgramSteps, rows: int | None, length: int | None, made_up: bool
    ) -> None:
        self._steps, self.rows, self._length, self._made_up = steps, rows, length, made_up
        self._longest: dict[int, tuple[Any, Any, int, Any]] = {}
        self._data = LongestRows()
        self._seen: Seen | None = None
        self._index: Any = None
        self._group = 1
        """How often each row is in a batch, if a batch has some again and again."""
        self._again = False
        """Whether a batch is asked for again."""

    @property
    def seen(self) -> Seen | None:
        """What the batches are like."""
        if self._seen is None or not (self._again or self._group > 1):
            return self._seen
        unit = lcm(self._group, self._steps.shared)
        whole = self._seen.rows % unit == 0
        return self._seen._replace(
            unit=unit if whole else self._seen.rows, shared=self._steps.shared
        )

    def follow(self, imports: WhenImported) -> None:
        """Make them from now on."""
        self._data.follow(imports)
        signature = inspect.signature(DataLoader.__init__)
        begin = DataLoader.__init__

        def begun(*arguments: Any, **options: Any) -> None:
            given = signature.bind(*arguments, **options)
            given.arguments.update(
                {name: value for name, value in _IN_THIS_PROCESS.items() if name in given.arguments}
            )
            begin(*given.args, **given.kwargs)

        put(DataLoader, "__init__", begun)
        of_fetchers(self._of_fetcher)
        put(torch, "randperm", _in_order)

    def _of_fetcher(self, kind: Any) -> None:
        fetch = kind.fetch
        put(kind, "fetch", lambda one, index: self._batch(one, index, fetch))

    def _batch(self, fetcher: Any, index: Any, fetch: Any) -> Any:
        self._steps.batch()
        collate, fetcher.collate_fn = fetcher.collate_fn, _as_they_are
        try:
            rows = fetch(fetcher, index)
        finally:
            fetcher.collate_fn = collate
        if not isinstance(rows, list) or not rows:  # one row, which the program batches
            return collate(rows)
        if packed := isinstance(rows[0], list):  # each of the batch's rows consists of these
            if not self._made_up:
                return collate(rows)
            packs, rows, index = len(rows), [*chain(*rows)], [*chain(*index)]
        longest, shorter, looked_at = self._longest_of(fetcher.dataset, rows)
        number = self.rows or len(rows)
        # Where rows differ, one is shorter, so that there is padding, and what hides it.
        last = longest if shorter is None or number == 1 or packed else shorter
        made = [copy.deepcopy(row) for row in [longest] * (number - 1) + [last]]
        if packed:
            made = [made] if packs == 1 else [[row] for row in made]
        batch = collate(made)
        if torch.is_grad_enabled():  # not an evaluation
            self._note(index)
            self._seen = Seen(len(rows), _tokens(batch, number), looked_at, *self._data.part)
        return batch

    def _note(self, index: Any) -> None:
        """Note whether the numbers of a batch's rows are those of other rows, or of the batch before."""
        times = {*Counter(index).values()}
        if type(index[0]) is int and times != {1}:
            self._group = times.pop() if len(times) == 1 else len(index)
        self._again = self._again or index == self._index
        self._index = index

    def _longest_of(self, dataset: Any, rows: list[Any]) -> tuple[Any, Any, int]:
        """The longest row, of the length that is asked for; the next shorter one, if there is any; and among
        how many."""
        if id(dataset) not in self._longest:
            by_extent: dict[int, Any] = {}
            looked_at = [*_some_of(dataset, rows)]
            for row in looked_at:
                by_extent.setdefault(_extent(row), row)
            found = [by_extent[extent] for extent in sorted(by_extent)[-2:]]
            if self._length is not None:
                found = [_stretched(found[-1], self._length - less) for less in range(len(found))]
                found.reverse()
            shorter = found[0] if len(found) > 1 else None
            self._longest[id(dataset)] = found[-1], shorter, len(looked_at), dataset
        return self._longest[id(dataset)][:3]


def _in_order(n: int, *, generator: Any = None, **options: Any) -> torch.Tensor:
    """Numbers that would be in a random order: it would depend on chance what is computed together."""
    return torch.arange(n, **options)


def _as_they_are(rows: Any) -> Any:
    return rows


def _some_of(dataset: Any, rows: list[Any]) -> Any:
    """Rows of a dataset, from all over it, for some seconds; those at hand if it has no numbers for them."""
    try:
        count = len(dataset)
    except TypeError:
        count = 0
    if not count or not hasattr(dataset, "__getitem__"):
        yield from rows
        return
    end = time.monotonic() + _SECONDS
    first = range(min(count, LONGEST))
    for number in dict.fromkeys((*first, *range(0, count, -(-count // _LOOKED_AT)))):
        yield dataset[number]
        if time.monotonic() > end:
            return


def _extent(value: Any) -> int:
    """The numbers, or characters, in a row."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, Mapping):
        return sum(map(_extent, value.values()))
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Sequence):
        return sum(map(_extent, value)) if value and hasattr(value[0], "__len__") else len(value)
    return getattr(value, "size", 1) if isinstance(getattr(value, "size", 1), int) else 1


def _stretched(row: Any, length: int) -> Any:
    """A row with so many tokens: what has one value for each token is repeated, or cut.

    Raises:
        NoPrediction: it has no tokens.
    """
    if not isinstance(row, Mapping) or _TOKENS not in row:
        raise NoPrediction(
            f"--max-length: {length}, but the rows of this program have no {_TOKENS} to lengthen or to cut. "
            "Leave it out, and give the program longer rows."
        )
    count = len(row[_TOKENS])
    times = -(-length // count)

    def stretched(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == count:
            return torch.cat([value] * times)[:length]
        if isinstance(value, list) and len(value) == count:
            return (value * times)[:length]
        return value

    return {name: stretched(value) for name, value in row.items()}


def _tokens(batch: Any, rows: int) -> int:
    tokens = batch.get(_TOKENS) if isinstance(batch, Mapping) else None
    return tokens.numel() // rows if isinstance(tokens, torch.Tensor) else 1
