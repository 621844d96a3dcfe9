"""Metrics and logs of a step that is taken in other parts than its batches."""

from __future__ import annotations

from collections import defaultdict

import pytest

from torchtune_adaptive.integrations import averages
from torchtune_adaptive.integrations.averages import Part, averaged, logs_of_batches, noted


def test_means_are_weighted_by_rows() -> None:
    parts = [Part(1, {"entropy": 1.0, "of one": 3.0}), Part(3, {"entropy": 5.0})]
    assert averaged(parts) == {"entropy": 4.0, "of one": 3.0}


def test_the_largest_is_the_largest_of_all() -> None:
    parts = [
        Part(3, {"min_reward": 1.0, "max_reward": 2.0}),
        Part(1, {"min_reward": 0.0, "max_reward": 5.0}),
    ]
    assert averaged(parts) == {"min_reward": 0.0, "max_reward": 5.0}


def test_what_is_added_is_told_from_what_is_replaced() -> None:
    metrics: dict[str, list[float]] = defaultdict(list, tokens=[7], loss=[1.0])
    with noted(lambda: metrics) as added:
        metrics["tokens"] = [9]
        metrics["loss"].append(2.0)
        metrics["new"].append(3.0)
    assert added == {"tokens": None, "loss": 2.0, "new": 3.0}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(1, 1.0), (1, 3.0), (2, 4.0)], 3.0),
        ([(4, 2.0)], 2.0),  # all rows at once
    ],
)
def test_each_batch_has_a_value(parts: list[tuple[int, float]], expected: float) -> None:
    before = {"entropy": [9.0], "tokens": [1.0]}
    metrics = {"entropy": [9.0, *(value for _, value in parts)], "tokens": [5.0]}
    made = [Part(rows, {"entropy": value, "tokens": None}) for rows, value in parts]
    averages.settle(metrics, before, 2, made)
    assert metrics == {"entropy": [9.0, expected, expected], "tokens": [5.0]}


def test_each_batch_logs_once() -> None:
    parts = [
        Part(1, logs=[{"mine": 1.0, "name": "a"}, {"other": 1}]),
        Part(3, logs=[{"mine": 5.0, "name": "b"}]),
    ]
    assert logs_of_batches(2, parts) == [{"mine": 4.0, "name": "a"}, {"other": 1.0}] * 2
    assert logs_of_batches(2, []) == []
