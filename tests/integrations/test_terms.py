"""What a loss is a sum or a mean of is found by the losses of rows, and of the same rows in two parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from torchtune_adaptive.common import TrainingOutOfMemory
from torchtune_adaptive.core import Ranks
from torchtune_adaptive.integrations.terms import Found, Terms, TermsFinder, with_a_label

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


def divided(labels: torch.Tensor, items: int) -> torch.Tensor:
    return summed(labels).sum() / items


def contrastive(labels: torch.Tensor, _: int) -> torch.Tensor:
    """A loss that compares rows: that of one alone is 0."""
    similarity = torch.outer(*[summed(labels).sum(-1)] * 2)
    return torch.nn.functional.cross_entropy(similarity, torch.arange(len(labels)))


def of_three(labels: torch.Tensor, _: int) -> torch.Tensor:
    """A loss that compares three rows: those of one and of two are 0."""
    return summed(labels).sum() * (len(labels) > 2)


LOSSES: dict[str, tuple[Callable[[torch.Tensor, int], Any], Any, Terms]] = {
    "items": (divided, padded, Terms.ITEMS),
    "a sum": (lambda labels, _: summed(labels).sum(), padded, Terms.ITEMS),
    "labels": (over_labels, padded, Terms.LABELS),
    "later labels": (lambda labels, n: over_labels(labels[:, 1:], n), padded, Terms.LATER_LABELS),
    "rows of labels": (over_rows, padded, Terms.ROWS),
    "rows": (over_rows, each_alone, Terms.ROWS),
    "partly items": (lambda labels, n: divided(labels, n) + 1, padded, Terms.BATCH),
    "with weights": (
        lambda labels, _: (summed(labels) * labels).sum() / labels.sum(),
        each_alone,
        Terms.BATCH,
    ),
    "between rows": (lambda labels, _: summed(labels).sum() ** 2, padded, Terms.BATCH),
    "contrastive": (contrastive, padded, Terms.BATCH),
    "of three rows": (of_three, padded, Terms.BATCH),
    "follows padding": (
        lambda labels, n: over_rows(labels, n) * (1 + 1e-3 * labels.shape[-1]),
        padded,
        Terms.BATCH,
    ),
    "nearly the same": (
        lambda labels, _: 4 + 1e-6 * over_labels(labels, _),
        padded,
        Terms.BATCH,
    ),
    "at random": (lambda labels, _: torch.rand(()), padded, Terms.BATCH),
    "no number": (lambda labels, _: torch.tensor(math.nan), padded, Terms.BATCH),
    "0": (lambda labels, _: torch.zeros(()), padded, Terms.BATCH),
}


def found(
    loss: Callable[[torch.Tensor, int], Any], collate: Any, rows: Any = ROWS, **more: Any
) -> Found:
    def losses(tried: Sequence[tuple[int, Any]]) -> list[float]:
        made = []
        for seed, one in tried:
            torch.manual_seed(seed)
            made.append(float(loss(one["labels"], 7)))
        return made

    return TermsFinder(
        losses, collate, rows, more.get("batch", 3), Ranks(), lambda: 1e-6, more.get("told", False)
    ).found()


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_is_a_sum_or_a_mean_of(name: str) -> None:
    loss, collate, expected = LOSSES[name]
    terms, why = found(loss, collate)
    assert terms == expected and bool(why) == (expected is Terms.BATCH)
    assert "\n" not in why


def test_a_sum_that_adds_up_by_chance_is_tried_with_other_rows() -> None:
    def of_the_hardest(labels: torch.Tensor, _: int) -> torch.Tensor:
        """Rows that are as large as half of the largest."""
        each = summed(labels)
        return each[each >= each.max() / 2].sum()

    rows = [[5], [5], [6], [5], [90], [6], [1], [2]]
    assert found(of_the_hardest, each_alone, rows[:4], batch=4).terms is Terms.ITEMS
    assert found(of_the_hardest, each_alone, rows, batch=4).terms is Terms.BATCH
    assert found(of_the_hardest, each_alone, rows, batch=4, told=True).terms is Terms.ITEMS


def test_of_images_labels_are_ignored_by_another_number() -> None:
    def images(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        labels = torch.full((len(rows), 3, 3), 255)
        for image, row in zip(labels, rows, strict=True):
            image.view(-1)[-len(row) :] = torch.tensor(row)
        return {"labels": labels}

    def over_pixels(labels: torch.Tensor, _: int) -> torch.Tensor:
        assert (labels != -100).all(), "which is no label of this model"
        return summed(labels, 255).sum() / (labels != 255).sum()

    assert found(over_pixels, images).terms is Terms.LABELS
    assert Terms.LABELS.number(images(ROWS), 6) == 27


def test_of_what_cannot_be_told_apart_the_one_that_mixes_no_batches_is_taken() -> None:
    assert found(over_rows, padded, EQUAL).terms is Terms.LABELS


def test_rows_without_labels_say_nothing_and_the_others_do() -> None:
    ignored = [[-100, -100]] * 3
    assert found(over_labels, padded, [*ignored, *ROWS]).terms is Terms.LABELS
    assert found(over_labels, padded, ignored).terms is Terms.BATCH


def test_batches_of_one_row_are_tried_together_and_stay_alone_if_that_fails() -> None:
    def of_one(labels: torch.Tensor, _: int) -> torch.Tensor:
        if len(labels) > 1:
            raise RuntimeError("mat1 and mat2\ncannot be multiplied")
        return summed(labels).sum()

    assert found(divided, padded, batch=1).terms is Terms.ITEMS
    terms, why = found(of_one, padded, batch=1)
    assert terms is Terms.BATCH and why.endswith(
        "(RuntimeError: mat1 and mat2 cannot be multiplied)"
    )
    assert found(of_one, padded, ROWS[:1]) == (Terms.BATCH, "")  # where there is nothing to divide


def test_fewer_rows_are_tried_where_memory_runs_out() -> None:
    def in_little_memory(labels: torch.Tensor, items: int) -> torch.Tensor:
        if len(labels) > 3:
            raise TrainingOutOfMemory("out of memory")
        return divided(labels, items)

    assert found(in_little_memory, padded, batch=6).terms is Terms.ITEMS
    with pytest.raises(TrainingOutOfMemory):
        found(lambda *_: in_little_memory(torch.zeros(4), 1), padded)


def test_groups_and_numbers_of_terms() -> None:
    batches = [4, 4, 4, 2]
    assert [one.groups(batches) for one in Terms] == [[14], [12, 2], batches, batches, batches]
    batch = padded(ROWS)
    assert [one.number(batch, 6) for one in Terms] == [6, 6, 27, 21, 6]


def test_a_batch_without_labels_gets_one() -> None:
    batch = {"labels": torch.full((2, 3), -100), "x": torch.zeros(2)}
    assert with_a_label(batch)["labels"][:, -1].tolist() == [0, 0]
    assert (batch["labels"] == -100).all()
