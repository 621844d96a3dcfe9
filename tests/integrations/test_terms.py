"""What a loss is a mean of is found by losses of one row and of two."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from torchtune_adaptive import UsageError
from torchtune_adaptive.core import Ranks
from torchtune_adaptive.integrations.terms import Terms, TermsFinder, Tried, with_a_label

Row = list[int]
ROWS = [[3, 1, 4, 1, 5, 9], [2, 6, 5], [3, 5, 8, 9, 7], [9, 3, 2, 3, 8, 4, 6], [2, 6], [4, 3, 3, 8]]
EQUAL = [row[:2] for row in ROWS]


def padded(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    return {"labels": torch.tensor([row + [-100] * (width - len(row)) for row in rows])}


def each_alone(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    return {"labels": torch.tensor([row[0] for row in rows])}


def summed(labels: torch.Tensor, ignored: int = -100) -> torch.Tensor:
    """A loss of each label, in place of that of a model."""
    return torch.where(labels == ignored, 0.0, (labels.double() + 1).log())


def count(labels: torch.Tensor) -> torch.Tensor:
    return (labels != -100).sum()


def over_labels(labels: torch.Tensor, _: int) -> torch.Tensor:
    return summed(labels).sum() / count(labels)


def over_rows(labels: torch.Tensor, _: int) -> torch.Tensor:
    of_rows = [summed(row).sum() / count(row) for row in labels.reshape(len(labels), -1)]
    return torch.stack(of_rows).mean()


LOSSES: dict[str, tuple[Callable[[torch.Tensor, int], Any], Any, Any]] = {
    "labels": (over_labels, padded, Terms.LABELS),
    "later labels": (lambda labels, n: over_labels(labels[:, 1:], n), padded, Terms.LATER_LABELS),
    "rows of labels": (over_rows, padded, Terms.ROWS),
    "rows": (over_rows, each_alone, Terms.ROWS),
    "with weights": (
        lambda labels, _: (summed(labels) * labels).sum() / labels.sum(),
        each_alone,
        None,
    ),
    "between rows": (lambda labels, _: summed(labels).sum() ** 2, padded, None),
    "at random": (lambda labels, _: torch.rand(()), padded, Terms.LABELS),
    "no number": (lambda labels, _: torch.tensor(math.nan), padded, Terms.LABELS),
}


def trial(loss: Callable[[torch.Tensor, int], Any], collate: Any, rows: Any = ROWS) -> TermsFinder:
    def losses(tried: Sequence[Tried]) -> list[float]:
        made = []
        for one in tried:
            torch.manual_seed(one.seed)
            made.append(float(loss(one.inputs["labels"], one.items)))
        return made

    return TermsFinder(losses, collate, rows, Ranks(), rounding=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_is_a_mean_of(name: str) -> None:
    loss, collate, expected = LOSSES[name]
    assert trial(loss, collate).mean_of() == expected


def test_of_what_cannot_be_told_apart_the_one_that_mixes_no_batches_is_taken() -> None:
    assert trial(over_rows, padded, EQUAL).mean_of() == Terms.LABELS
    assert trial(over_labels, padded, ROWS[:1]).mean_of() == Terms.LABELS


def test_whether_a_loss_is_divided_by_the_items() -> None:
    assert trial(lambda labels, items: summed(labels).sum() / items, padded).divides_by_items()
    assert not trial(over_labels, padded).divides_by_items()
    # Rows without labels say nothing; the others do.
    ignored = [[-100, -100]] * 3
    assert not trial(over_labels, padded, [*ignored, ROWS[0]]).divides_by_items()
    assert trial(over_labels, padded, ignored).divides_by_items()
    both = lambda labels, items: summed(labels).sum() / items + 1  # noqa: E731
    with pytest.raises(
        UsageError, match=r"compute_loss: a part of the loss is divided .* Divide all"
    ):
        trial(both, padded).divides_by_items()


def test_groups_and_numbers_of_terms() -> None:
    batches = [4, 4, 4, 2]
    assert [one.groups(batches) for one in (Terms.ITEMS, Terms.ROWS, Terms.LABELS)] == [
        [14],
        [12, 2],
        batches,
    ]
    batch = padded(ROWS)
    assert [one.number(batch, 6) for one in Terms] == [6, 6, 27, 21]


def test_a_batch_without_labels_gets_one() -> None:
    batch = {"labels": torch.full((2, 3), -100), "x": torch.zeros(2)}
    assert with_a_label(batch)["labels"][:, -1].tolist() == [0, 0]
    assert (batch["labels"] == -100).all()
