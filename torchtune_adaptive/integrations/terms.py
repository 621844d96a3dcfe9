"""What the loss of a batch is a mean of: a model may take ``num_items_in_batch`` and not divide by it.

Nothing says what a model does, so it is tried before the first step. A loss that is divided by
``num_items_in_batch`` adds up over micro-batches. A mean does not: each has to count by its share of the
terms of its batch, as the trainer itself adds up the means of whole batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any

import torch

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core import Ranks

_IGNORED = -100
"""The label that transformers counts and trains on nowhere."""
_TRIED = 4
"""Rows, or pairs of rows, that are tried where the first say nothing: their loss is 0, say."""
_LOOKED_AT = 32
"""Rows among which those to try are chosen."""
_CLOSE = 0.04
"""How far a loss may be from a prediction, as a share of what two rows differ by. Predictions for the rows
that are tried are at least twice as far from each other."""


class Terms(Enum):
    """What a loss is a sum or a mean of."""

    ITEMS = "num_items_in_batch"
    """A sum, divided by the items of the whole step."""
    ROWS = "its rows"
    LABELS = "its labels"
    LATER_LABELS = "its labels but the first of each row"

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
        later = labels[..., 1:] if self is Terms.LATER_LABELS else labels
        return int((later != _IGNORED).sum())

    def groups(self, batches: Sequence[int]) -> list[int]:
        """The rows that may share a micro-batch, given those of each batch: they count alike."""
        if self is Terms.ITEMS:
            return [sum(batches)]
        if self.of_labels:
            return list(batches)
        return [sum(alike) for _, alike in groupby(batches)]


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


@dataclass(frozen=True)
class Tried:
    """A batch whose loss is computed."""

    inputs: Any
    items: int = 1
    """What ``num_items_in_batch`` is multiplied by."""
    seed: int = 0


class TermsFinder:
    """Finds what a loss is a mean of, by losses of one row and of two.

    All ranks try as many, and find the same.

    Args:
        losses: function that computes losses, without gradients, on all ranks.
        collate: function that makes a batch of rows.
        rows: those of a step, as many on each rank.
        rounding: the relative error of a loss.
    """

    def __init__(
        self,
        losses: Callable[[Sequence[Tried]], list[float]],
        collate: Callable[[Sequence[Any]], Any],
        rows: Sequence[Any],
        ranks: Ranks,
        rounding: float,
    ) -> None:
        self._losses, self._collate, self._ranks = losses, collate, ranks
        self._rounding = rounding
        self._rows = sorted(rows[:_LOOKED_AT], key=self._rank_of_row)

    def _rank_of_row(self, row: Any) -> float:
        """The number of its labels, or its only one."""
        labels = labels_of(self._collate([row]))
        if labels is None:
            return 0.0
        return float(labels.flatten()[0]) if labels.numel() == 1 else float(_valid(labels).sum())

    def divides_by_items(self) -> bool:
        """Whether a loss is divided by ``num_items_in_batch``; also where all are 0 or no number.

        Raises:
            UsageError: a part of it is.
        """
        for row in reversed(self._rows[-_TRIED:]):
            inputs = self._collate([row])
            one, two = self._losses([Tried(inputs), Tried(inputs, items=2)])
            says = None
            if math.isfinite(one) and math.isfinite(two) and one:
                says = next((n for n in (1.0, 0.5) if abs(two / one - n) < 1e-3), math.nan)
            all_say = {*self._ranks.gather(says)} - {None}
            if all_say == {0.5} or all_say == {1.0}:
                return all_say == {0.5}
            if all_say:
                raise UsageError(
                    "compute_loss: a part of the loss is divided by num_items_in_batch, and another is not "
                    "(it is not half for twice as many items), so it would follow the micro-batches. "
                    "Divide all of it."
                )
        return True

    def mean_of(self) -> Terms | None:
        """What a loss is a mean of; None if of nothing that is known."""
        rows, left = self._rows, [Terms.ROWS]
        for number in range(min(_TRIED, -(-len(rows) // 2))):
            batches = self._batches(rows[number], rows[-1 - number])  # which differ much
            if number == 0 and _many(labels_of(batches[2])):
                left = [Terms.LABELS, Terms.LATER_LABELS, Terms.ROWS]
            tried = [Tried(each) for each in batches]
            a, b, both, again = self._losses([*tried, Tried(batches[0], seed=1)])
            apart, error = abs(a - b), self._rounding * abs(both)
            if not math.isfinite(apart + both) or apart <= error or abs(a - again) > error:
                continue  # nothing can be seen: there is no number, no difference, or it is drawn at random
            for terms in tuple(left):
                m, n = terms.number(batches[0], 1), terms.number(batches[1], 1)
                if m + n and abs((m * a + n * b) / (m + n) - both) > _CLOSE * apart + error:
                    left.remove(terms)
        everyones = self._ranks.gather(left)
        return next((one for one in everyones[0] if all(one in each for each in everyones)), None)

    def _batches(self, *pair: Any) -> list[Any]:
        """The batch of each row and of both; where there are labels to ignore, with few of the first."""
        batches = [self._collate([row]) for row in pair]
        batches.append(self._collate(pair))
        labels = labels_of(batches[2])
        if labels is None or not _many(labels) or len(labels) != 2 or _valid(labels).all():
            return batches  # nobody knows whether the model knows what to ignore
        kept = [(1,), (3,), (1, 3)]
        return [_thinned(each, labels) for each, labels in zip(batches, kept, strict=True)]


def _valid(labels: torch.Tensor) -> torch.Tensor:
    return labels != _IGNORED


def _many(labels: torch.Tensor | None) -> bool:
    """Whether a row has many labels, some of which may be ignored."""
    return labels is not None and labels.dim() == 2 and not labels.is_floating_point()


def _thinned(inputs: Any, kept: Sequence[int]) -> dict[str, Any]:
    """A batch with the last labels of each row, so many, and with one at its first token."""
    labels = inputs["labels"].clone()
    mask = inputs.get("attention_mask")
    for number, (row, count) in enumerate(zip(labels, kept, strict=True)):
        last = _valid(row).nonzero().flatten()[-count:]
        values = row[last]
        row.fill_(_IGNORED)
        row[last] = values
        padded_in_front = mask is not None and not mask[number].flatten()[0]
        if len(last) and not padded_in_front:
            row[0] = values[-1]
    return {**inputs, "labels": labels}
