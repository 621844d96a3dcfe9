"""Rows that a program reads with ``datasets``: of many a part, in which the longest come first.

A program may prepare all of its rows before it begins, for an hour. Memory runs out with the longest.
"""

from __future__ import annotations

import random
from typing import Any

from torchtune_adaptive.planner.programs.imports import WhenImported, put

_READ, LONGEST = 2048, 16
"""The rows that are read of a dataset, and how many of these are the longest, which are the first."""


class LongestRows:
    """Reads datasets; ``part`` has the rows that were read of the largest one, and its rows."""

    def __init__(self) -> None:
        self.part = (0, 0)

    def follow(self, imports: WhenImported) -> None:
        """Read a part from now on."""
        imports.call("datasets.load", self._of_load)
        imports.call("datasets.arrow_dataset", _in_this_process)

    def _of_load(self, load: Any) -> None:
        for name in ("load_dataset", "load_from_disk"):
            read = getattr(load, name)
            put(load, name, lambda *given, read=read, **named: self._some(read(*given, **named)))

    def _some(self, dataset: Any) -> Any:
        if isinstance(dataset, dict):
            dataset.update({name: self._some(one) for name, one in dataset.items()})
        elif hasattr(dataset, "select") and (there := len(dataset)) > _READ:
            extents = _extents(dataset.with_format("arrow")[:])
            longest = extents.argsort(kind="stable")[::-1][:LONGEST].tolist()
            others = random.Random(0).sample(range(there), _READ - LONGEST)
            dataset = dataset.select([*longest, *sorted({*others} - {*longest})])
            self.part = max(self.part, (len(dataset), there), key=lambda part: part[1])
        return dataset


def _in_this_process(datasets: Any) -> None:
    """Let rows, which are few, be prepared here: other processes would take longer to begin."""
    prepare = datasets.Dataset.map

    def prepared(*given: Any, **named: Any) -> Any:
        return prepare(*given, **{**named, "num_proc": None})

    put(datasets.Dataset, "map", prepared)


def _extents(values: Any) -> Any:
    """The characters and numbers in each row of a table of Arrow, or of a column."""
    import numpy
    import pyarrow
    from pyarrow import compute, types

    if isinstance(values, pyarrow.Table):
        return sum(map(_extents, values.columns))
    if isinstance(values, pyarrow.ChunkedArray):
        values = values.combine_chunks()
    kind, count = values.type, len(values)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _extents(values.storage)
    if types.is_struct(kind):
        return sum((_extents(one) for one in values.flatten()), numpy.zeros(count))
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind):
        return compute.fill_null(compute.binary_length(values), 0).to_numpy(zero_copy_only=False)
    if types.is_list(kind) or types.is_large_list(kind):
        parents = compute.list_parent_indices(values).to_numpy(zero_copy_only=False)
        return numpy.bincount(parents, weights=_extents(values.flatten()), minlength=count)
    return numpy.ones(count)
