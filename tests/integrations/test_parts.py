"""What parts of a batch have given, put together."""

from __future__ import annotations

import pytest
import torch

from torchtune_adaptive import UsageError
from torchtune_adaptive.integrations.parts import joined, weighted_mean


def test_parts_of_unequal_lengths_are_padded_as_transformers_pads() -> None:
    parts = [torch.ones(2, 2, 3), torch.full((1, 4, 3), 2.0)]
    whole = joined(parts, [2, 1])
    assert whole.shape == (3, 4, 3)
    assert whole[:2, :2].eq(1).all() and whole[2].eq(2).all() and whole[:2, 2:].eq(-100).all()


def test_rows_that_come_twice_stay_in_their_blocks() -> None:
    # The chosen answers of a batch, and then the rejected ones.
    parts = [torch.tensor([1, 2, -1, -2]), torch.tensor([3, -3])]
    assert joined(parts, [2, 1]).tolist() == [1, 2, 3, -1, -2, -3]


def test_nested_predictions() -> None:
    one, two = torch.zeros(1, 2), torch.ones(2, 2)
    logits = [({"a": one}, [one, None]), ({"a": two}, [two, None])]
    found = joined(logits, [1, 2])
    assert found[0]["a"].tolist() == found[1][0].tolist() == [[0, 0], [1, 1], [1, 1]]
    assert found[1][1] is None and joined([None, None], [1, 2]) is None


def test_rows_without_padding_follow_each_other() -> None:
    parts = [torch.tensor([[1, 2]]), torch.tensor([[3, 4, 5]])]
    assert joined(parts, [1, 2], flat=True).tolist() == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    "parts", [[torch.zeros(()), torch.zeros(())], [torch.zeros(2), torch.zeros(3)]]
)
def test_what_has_no_row_for_each_is_refused(parts: list[torch.Tensor]) -> None:
    with pytest.raises(UsageError, match="per_device_eval_batch_size"):
        joined(parts, [2, 2])


def test_a_mean_ignores_what_has_no_weight() -> None:
    assert weighted_mean([1.0, 4.0], [2, 1]) == 2.0
    assert weighted_mean([float("nan"), 4.0], [0, 1]) == 4.0
    assert weighted_mean([0.1, 0.1, 0.1], [3, 7, 11]) == 0.1
    assert weighted_mean([5.0, 6.0], [0, 0]) == 5.0
