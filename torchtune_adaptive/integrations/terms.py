"""What a loss is a sum or a mean of: a model may take ``num_items_in_batch`` and not divide by it.

Nothing says what a model does, so it is tried before the first step: by the losses of some rows, and of the
same rows in two parts. A loss that is divided by ``num_items_in_batch`` adds up over micro-batches. In a
mean, each counts by its share of the terms of its batch, as the trainer itself adds up the means of whole
batches. A loss that is anything else, or of which nothing can be seen, is not divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import groupby
from typing import Any, NamedTuple

import torch

from torchtune_adaptive.common import RankLost, TrainingOutOfMemory
from torchtune_adaptive.core import Ranks

_IGNORED = -100
"""The label that transformers counts and trains on nowhere."""
_IGNORED_IN_IMAGES = 255
"""That of a pixel, in models of images."""
_APART = 1e-3
"""The relative difference of two losses from which a mean shows how much each counts."""
_FEW = 8
"""Rows that are tried together where a batch has one."""
_PAIRS = 4
"""Pairs of rows that differ much, by which means are told apart."""
_LOOKED_AT = 32
"""Rows among which those pairs are chosen."""


class Terms(Enum):
    """What a loss is a sum or a mean of."""

    ITEMS = "num_items_in_batch"
    """A sum, divided by the items of the whole step."""
    ROWS = "its rows"
    LABELS = "its labels"
    LATER_LABELS = "its labels but the first of each row"
    BATCH = "its whole batch"
    """Anything else: a micro-batch is a batch of the trainer's own."""

    @property
    def divides(self) -> bool:
        """Whether a batch may be divided."""
        return self is not Terms.BATCH

    @property
    def of_labels(self) -> bool:
        """Whether rows have different numbers of terms, so that a micro-batch is part of one batch."""
        return self in (Terms.LABELS, Terms.LATER_LABELS)

    def number(self, inputs: Any, rows: int) -> int:
        """The number of terms in a batch."""
        if not self.of_labels:
            return rows
        labels = labels_of(inputs)
        if labels is None:
            return 0
        return int(_valid(labels[..., 1:] if self is Terms.LATER_LABELS else labels).sum())

    def groups(self, batches: Sequence[int]) -> list[int]:
        """The rows that may share a micro-batch, given those of each batch: they count alike."""
        if self is Terms.ITEMS:
            return [sum(batches)]
        if self is Terms.ROWS:
            return [sum(alike) for _, alike in groupby(batches)]
        return list(batches)


class Found(NamedTuple):
    """What a loss is a sum or a mean of, and why it is of a whole batch."""

    terms: Terms
    why: str = ""


def labels_of(inputs: Any) -> torch.Tensor | None:
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    return labels if isinstance(labels, torch.Tensor) else None


def with_a_label(inputs: Any) -> dict[str, Any]:
    """A batch without labels, with one: a mean over none is not a number, and neither is 0 times that."""
    labels = labels_of(inputs)
    assert labels is not None
    labels = labels.clone()
    labels[..., -1] = 0
    return {**inputs, "labels": labels}


class _Divided(NamedTuple):
    """Some rows, the number of them in the first of two parts, and the batches of both parts and of all."""

    rows: Sequence[Any]
    first: int
    one: Any
    other: Any
    whole: Any


class TermsFinder:
    """Finds what a loss is a sum or a mean of.

    All ranks try as many, and find the same.

    Args:
        losses: function that computes the losses of some batches, without gradients, on all ranks; each
            comes with a seed of its own, so that a loss that draws random numbers shows it.
        collate: function that makes a batch of rows.
        rows: those of a step, as many on each rank.
        batch: the rows of a batch.
        rounding: function that gives the relative error of losses that have been computed.
        told: whether the loss is told what a sum is divided by. One that is not may add up by chance, as that
            of the rows which are hardest among others.
    """

    def __init__(
        self,
        losses: Callable[[Sequence[tuple[int, Any]]], list[float]],
        collate: Callable[[Sequence[Any]], Any],
        rows: Sequence[Any],
        batch: int,
        ranks: Ranks,
        rounding: Callable[[], float],
        told: bool = False,
    ) -> None:
        self._losses, self._collate, self._ranks = losses, collate, ranks
        self._rows, self._batch, self._rounding, self._told = rows, batch, rounding, told
        self._seen = self._apart = False
        """Whether any loss is a number, and not 0; and whether any two differ."""

    def found(self) -> Found:
        """What the loss is a sum or a mean of."""
        if len(self._rows) == 1:
            return Found(Terms.BATCH)  # there is nothing to divide
        try:
            batch = self._batch if self._batch > 1 else _FEW
            left = [Terms.ITEMS, Terms.LABELS, Terms.LATER_LABELS, Terms.ROWS]
            two = self._rows[: 2 * batch]
            for some in (two[:batch], two[batch:], two) if len(two) > batch else (two,):
                for rows in (some, [*some[::2], *some[1::2]]):
                    if left != [Terms.ITEMS] or not self._told:
                        left = self._left_of_rows(rows, left)
            if left and left != [Terms.ITEMS]:
                left = self._left_of_pairs(left)
        except (TrainingOutOfMemory, RankLost):
            raise
        except Exception as error:  # of anybody's code
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return Found(Terms.BATCH, f"its loss cannot be computed for other rows ({said})")
        if not any(self._ranks.gather(self._seen)):
            return Found(Terms.BATCH, "its losses before the first step are 0 or not numbers")
        if not left:
            return Found(
                Terms.BATCH, "its loss follows how rows are put together, or draws random numbers"
            )
        if left != [Terms.ITEMS] and not any(self._ranks.gather(self._apart)):
            return Found(Terms.BATCH, "its losses before the first step are all the same")
        return Found(left[0])

    def _left_of_rows(self, rows: Sequence[Any], left: list[Terms]) -> list[Terms]:
        """What of this the loss may be by that of these rows, and those of their halves; of fewer if these
        are too many to compute at once."""
        half = len(rows) // 2
        if not half or not left:
            return left
        try:
            divided = _Divided(rows, half, *map(self._collate, (rows[:half], rows[half:], rows)))
            many = _many(labels_of(divided.whole))
            return self._left_by(divided, [t for t in left if many or not t.of_labels])
        except TrainingOutOfMemory as error:
            if not error.everywhere or half < 2:
                raise
        return self._left_of_rows(rows[:half], left)

    def _left_of_pairs(self, left: list[Terms]) -> list[Terms]:
        """What the loss may be by those of rows, two at a time, that differ much."""
        rows = sorted(self._rows[:_LOOKED_AT], key=self._rank_of_row)
        for number in range(min(_PAIRS, len(rows) // 2)):
            pair = (rows[number], rows[-1 - number])
            left = self._left_by(self._thinned(pair), left)
        return left

    def _left_by(self, divided: _Divided, left: Sequence[Terms]) -> list[Terms]:
        """What of this agrees with the losses of a batch and of its parts, on all ranks."""
        a, b, whole = self._losses([*enumerate(divided[2:])])
        largest = max(map(abs, (a, b, whole)))
        agree = list(left)
        if math.isfinite(a + b + whole) and largest:
            self._seen = True
            error = self._rounding() * largest
            self._apart |= abs(a - b) > max(4 * error, _APART * largest)
            agree = [t for t in left if abs(_predicted(t, divided, a, b) - whole) <= error]
        everyones = self._ranks.gather(agree)
        return [one for one in left if all(one in each for each in everyones)]

    def _rank_of_row(self, row: Any) -> float:
        """The number of its labels, or its only one."""
        labels = labels_of(self._collate([row]))
        if labels is None:
            return 0.0
        return float(labels.flatten()[0]) if labels.numel() == 1 else float(_valid(labels).sum())

    def _thinned(self, pair: Sequence[Any]) -> _Divided:
        """Two rows; where there are labels to ignore, with few of the first, and many more of the other."""
        batches = [self._collate([row]) for row in pair]
        batches.append(self._collate(pair))
        labels = labels_of(batches[2])
        if labels is None or not _many(labels) or len(labels) != 2 or _valid(labels).all():
            # Nobody knows whether the model knows what to ignore.
            return _Divided(pair, 1, *batches)
        kept, ignored = [(1,), (3,), (1, 3)], labels[~_valid(labels)][0]
        thinned = [_thinned(*each, ignored) for each in zip(batches, kept, strict=True)]
        return _Divided(pair, 1, *thinned)


def _predicted(terms: Terms, divided: _Divided, a: float, b: float) -> float:
    """The loss of some rows, given those of the parts."""
    if terms is Terms.ITEMS:
        return a + b
    m = terms.number(divided.one, divided.first)
    n = terms.number(divided.other, len(divided.rows) - divided.first)
    return (m * a + n * b) / (m + n) if m + n else math.nan


def _valid(labels: torch.Tensor) -> torch.Tensor:
    valid = labels != _IGNORED
    return valid & (labels != _IGNORED_IN_IMAGES) if labels.dim() > 2 else valid


def _many(labels: torch.Tensor | None) -> bool:
    """Whether a row has many labels, some of which may be ignored."""
    return labels is not None and labels.dim() > 1 and not labels.is_floating_point()


def _thinned(inputs: Any, kept: Sequence[int], ignored: torch.Tensor) -> dict[str, Any]:
    """A batch with the last labels of each row, so many, and with one at its first token."""
    labels = inputs["labels"].clone()
    mask, valid = inputs.get("attention_mask"), _valid(labels).flatten(1)
    for number, (row, count) in enumerate(zip(labels.view(len(labels), -1), kept, strict=True)):
        last = valid[number].nonzero().flatten()[-count:]
        values = row[last]
        row.fill_(ignored)
        row[last] = values
        padded_in_front = mask is not None and not mask[number].flatten()[0]
        if len(last) and not padded_in_front:
            row[0] = values[-1]
    return {**inputs, "labels": labels}
