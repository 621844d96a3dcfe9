"""Rows on their way from a dataset to the micro-batch that is made of them."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import torch

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core import Generators
from torchtune_adaptive.integrations import private
from torchtune_adaptive.integrations.equality import equal

_LOOKED_AT = 4096
"""Rows of a dataset that is not a table that are looked at for the longest; loading one may be slow."""
_GENERATORS = (torch.Generator, np.random.Generator, random.Random)


class KeptRows:
    """Rows that a data loader has loaded, and what its collate function has made of them.

    Nobody on the way looks into it. A process that loads data sends the rows along, packed: most steps do
    not need them, so they are unpacked where they are asked for.

    Args:
        made: what was made of so many rows each, in their order.
    """

    def __init__(self, rows: Sequence[Any], made: Sequence[tuple[int, Any]] = ()) -> None:
        self._rows = list(rows)
        self._packed = b""
        self._number = len(self._rows)
        self.made = list(made)

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, key: Any) -> Any:
        raise UsageError(
            f"get_train_dataloader: your loader looks into a batch (for {key!r}), of which there are only "
            "rows so far. Change rows in the dataset, or batches in data_collator."
        )

    @property
    def rows(self) -> list[Any]:
        if self._packed:
            self._rows, self._packed = pickle.loads(self._packed), b""
        return self._rows

    @property
    def inputs(self) -> Any:
        """What was made of all rows at once."""
        [(_, inputs)] = self.made
        return inputs

    def part(self, numbers: Sequence[int]) -> Any:
        """A batch of some of the rows, as they are in what was made of all; see ``sliced``."""
        if len(numbers) == len(self):
            return copy.deepcopy(self.inputs)
        return sliced(self.inputs, numbers, len(self))

    def pin_memory(self) -> KeptRows:
        """What a loader calls for batches of a kind that it does not know."""
        self.made = [(rows, private.pinned(inputs)) for rows, inputs in self.made]
        return self

    def __getstate__(self) -> dict[str, Any]:
        packed = self._packed or _packed(self._rows)
        return {"_rows": [], "_packed": packed, "_number": self._number, "made": self.made}


class RowsOfStep(Sequence[Any]):
    """The rows of the batches of a step."""

    def __init__(self, batches: Sequence[KeptRows]) -> None:
        self._batches = batches
        self._number = sum(map(len, batches))

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, number: Any) -> Any:
        return self._all[number]

    @cached_property
    def _all(self) -> list[Any]:
        return [row for batch in self._batches for row in batch.rows]

    def part(self, numbers: Sequence[int]) -> Any:
        """The same of the batch that has these rows."""
        for batch in self._batches:
            if numbers[0] < len(batch):
                break
            numbers = [number - len(batch) for number in numbers]
        return batch.part(numbers)

    def made(self) -> dict[tuple[int, ...], Any]:
        """What has been made of rows, by their numbers."""
        found: dict[tuple[int, ...], Any] = {}
        start = 0
        for rows, inputs in (each for batch in self._batches for each in batch.made):
            found[tuple(range(start, start + rows))] = inputs
            start += rows
        return found


class _Packer(pickle.Pickler):
    """Packs tensors by their values: by default, one that is part of another brings all of that."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.requires_grad:
            return NotImplemented
        try:
            return torch.from_numpy, (value.numpy(),)
        except (TypeError, RuntimeError):  # numpy does not have all that tensors may be
            return value.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _packed(rows: list[Any]) -> bytes:
    packed = io.BytesIO()
    _Packer(packed, pickle.HIGHEST_PROTOCOL).dump(rows)
    return packed.getvalue()


class Keeping:
    """A collate function that keeps the rows; it may go to a process that loads data."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate
        self._size = torch.zeros((), dtype=torch.int64).share_memory_()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.collate, name)  # trainers ask theirs, such as for the columns of labels

    @property
    def size(self) -> int:
        """The most rows that it makes something of at once, or 0; processes that load data share it."""
        return int(self._size)

    @size.setter
    def size(self, size: int) -> None:
        self._size.fill_(size)

    def __call__(self, rows: Sequence[Any]) -> KeptRows:
        size = self.size or len(rows) or 1
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        return KeptRows(rows, [(len(part), self.collate(_copied(part))) for part in parts])

    @staticmethod
    def of(loader: Any) -> Keeping | None:
        """That of a loader, around which transformers may put one that drops columns."""
        collate = getattr(loader, "collate_fn", None)
        inside = getattr(collate, "data_collator", None)
        return next((each for each in (collate, inside) if isinstance(each, Keeping)), None)

    def again(self, rows: Sequence[Any]) -> Any:
        """The same of some of the rows; generators of the collate function's own are left as they are."""
        with self.apart():
            return self.collate(_copied(rows))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A context in which the collate function draws from copies of its own generators."""
        attributes = getattr(self.collate, "__dict__", {})
        own = {name: value for name, value in attributes.items() if isinstance(value, _GENERATORS)}
        attributes.update(copy.deepcopy(own))
        try:
            yield
        finally:
            attributes.update(own)

    def repeats(self, batch: KeptRows, device: torch.device) -> bool:
        """Whether the same rows give the same batch again; draws no random numbers of the run."""
        drawn = Generators(device)
        same = equal(self.again(batch.rows), batch.inputs)
        drawn.restore()
        return same


def _copied(rows: Sequence[Any]) -> list[Any]:
    """Copies of rows, which some collate functions change."""
    # A dict's own way to copy itself is the same, sooner.
    return [row.copy() if type(row) is dict else copy.copy(row) for row in rows]


def sliced(value: Any, numbers: Sequence[int], of: int, top: bool = True) -> Any:
    """Some rows of a batch of so many, as that has them: padded to its longest, and masked as they are.

    Raises:
        ValueError: it is not known which part of the batch is that of these rows.
    """
    if isinstance(value, Mapping):
        part: Any = copy.copy(value)  # of the same kind
        part.update({name: sliced(each, numbers, of, False) for name, each in value.items()})
        return part
    listed = isinstance(value, (list, tuple))
    if listed and top:
        return type(value)(sliced(each, numbers, of, False) for each in value)
    if not listed and not getattr(value, "ndim", 0):
        return value
    columns = listed and all(getattr(each, "shape", ())[:1] == (of,) for each in value)
    if len(value) != of or columns:
        raise ValueError(f"a {type(value).__name__} of {len(value)} in a batch of {of} rows")
    return type(value)(value[number] for number in numbers) if listed else value[list(numbers)]


def longest(dataset: Any, collate: Callable[[list[Any]], KeptRows], device: torch.device) -> Any:
    """The row that makes the largest batch by itself, as the collate function of a loader gets it.

    Each list in a row counts, and so does each pair of them: a prompt, and each of two answers to it.
    """
    drawn = Generators(device)  # a dataset may draw random numbers
    try:
        dataset = _drawing_apart(dataset)
        lengths = _lengths_in_table(dataset)
        if lengths is None:
            stride = -(-len(dataset) // _LOOKED_AT)
            numbers = range(0, len(dataset), stride)
            lengths = _lengths(dataset[number] for number in numbers)
        else:
            numbers = range(len(dataset))
        candidates = {numbers[at] for at in longest_by(lengths)} or {0}
        batches = [collate([dataset[number]]) for number in sorted(candidates)]
        return max(batches, key=lambda batch: numbers_in(batch.inputs)).rows[0]
    finally:
        drawn.restore()


def _drawing_apart(dataset: Any) -> Any:
    """The dataset, with a copy of what makes its rows when they are asked for, and of its generators."""
    form = dict(getattr(dataset, "format", {}))
    made_by = copy.deepcopy(form.pop("format_kwargs", {}))
    return dataset.with_format(**form, **made_by) if form.get("type") == "custom" else dataset


def longest_by(lengths: Mapping[str, Sequence[int]]) -> set[int]:
    """The rows that are longest in a column, in two, or in all."""
    columns = list(lengths.values())
    sums = [*columns, *(_sum(pair) for pair in combinations(columns, 2)), _sum(columns)]
    return {max(range(len(each)), key=each.__getitem__) for each in sums if each}


def _sum(columns: Iterable[Sequence[int]]) -> list[int]:
    return [sum(row) for row in zip(*columns, strict=True)]


def _lengths(rows: Iterable[Any]) -> dict[str, list[int]]:
    """The length of each value of rows that has one; a row that is no mapping has one value."""
    found: dict[str, list[int]] = {}
    for count, row in enumerate(rows):
        values = row if isinstance(row, Mapping) else {"": row}
        for name, value in values.items():
            # A number may be a tensor, which has the method and no length.
            if hasattr(value, "__len__") and getattr(value, "shape", None) != ():
                column = found.setdefault(str(name), [])
                column += [0] * (count - len(column)) + [len(value)]
        for column in found.values():
            column += [0] * (count + 1 - len(column))
    return found


def _lengths_in_table(dataset: Any) -> dict[str, list[int]] | None:
    """The lengths of lists and texts in a ``datasets.Dataset``, read from its table without loading rows;
    None if it is none, or its rows are made when they are asked for."""
    if not hasattr(dataset, "with_format") or dict(getattr(dataset, "format", {})).get("type"):
        return None
    found: dict[str, list[int]] = {}
    for part in dataset.with_format("arrow").iter(batch_size=1 << 16):
        for name in part.column_names:
            for column in part[name].chunks:
                for what, lengths in (("", _items(column)), (" text", _characters(column))):
                    if lengths is not None:
                        found.setdefault(f"{name}{what}", []).extend(lengths)
    return found or None


def _items(column: Any) -> list[int] | None:
    """The number of items in each value, where these are lists."""
    import pyarrow

    kind = column.type
    if not (pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)):
        return None
    import pyarrow.compute

    return [length or 0 for length in pyarrow.compute.list_value_length(column).to_pylist()]


def _characters(column: Any) -> list[int] | None:
    """The characters of each value's texts, in whatever lists and structures; None if it has no text, or
    more."""
    kind = str(column.type)
    if "string" not in kind or "binary" in kind:  # an image has a path, too
        return None
    return [_characters_in(each) for each in column.to_pylist()]


def _characters_in(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = [*value.values()]
    return sum(map(_characters_in, value)) if isinstance(value, list) else 0


def tokens_in(batch: Any) -> int:
    """The tokens of a batch, padding included: the numbers in its largest tensor."""
    return max((tensor.numel() for tensor in _tensors(batch)), default=0)


def numbers_in(batch: Any) -> int:
    """The numbers in the tensors of a batch."""
    return sum(tensor.numel() for tensor in _tensors(batch))


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(value)
