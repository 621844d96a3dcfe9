"""Metrics and logs of a step that is taken in other parts than its batches."""

from __future__ import annotations

import copy
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtune_adaptive.integrations import averages
from torchtune_adaptive.integrations.averages import (
    COUNTS,
    Part,
    averaged,
    counts,
    logs_of_batches,
    noted,
)


def row(**found: int) -> list[int]:
    return [found.get(name.replace(" ", "_"), 0) for name in COUNTS]


def test_counts() -> None:
    labels = torch.tensor([[1, -100, 3], [1, 2, -100]])
    assert counts({"labels": labels}, 2) == row(rows=2, labels=2)
    mask = torch.tensor([[0, 1, 1], [1, 0, 1]])
    # One pair, whose rejected answer follows; or two rows, of which the first was rejected.
    assert counts({"completion_mask": mask}, 1) == row(
        rows=1, tokens=3, chosen=2, rejected=1, chosen_rows=1, rejected_rows=1
    )
    answers = {"completion_mask": mask, "label": torch.tensor([False, True])}
    assert counts(answers, 2) == row(
        rows=2, tokens=3, chosen=1, rejected=2, chosen_rows=1, rejected_rows=1
    )


def test_means_are_weighted_by_what_they_are_means_of() -> None:
    parts = [{"entropy": 1.0, "accuracy": 1.0}, {"entropy": 4.0, "accuracy": 2.0}]
    weights = [row(rows=1, labels=2), row(rows=1, labels=1)]
    assert averaged("SFTTrainer", parts, weights) == {"entropy": 2.0, "accuracy": 1.5}


def test_the_largest_is_the_largest_of_all() -> None:
    parts = [{"min_reward": 1.0, "max_reward": 2.0}, {"min_reward": 0.0, "max_reward": 5.0}]
    found = averaged("RewardTrainer", parts, [row(rows=3), row(rows=1)])
    assert found == {"min_reward": 0.0, "max_reward": 5.0}


def test_margins_of_single_answers_are_the_difference_of_their_means() -> None:
    parts = [
        {"rewards/chosen": 1.0, "rewards/rejected": 0.0, "rewards/margins": 1.0},
        {"rewards/chosen": 4.0},
    ]
    weights = [row(rows=2, chosen_rows=1, rejected_rows=1), row(rows=2, chosen_rows=2)]
    found = averaged("KTOTrainer", parts, weights)
    assert found == {"rewards/chosen": 3.0, "rewards/rejected": 0.0, "rewards/margins": 3.0}


def test_what_is_added_is_told_from_what_is_replaced() -> None:
    metrics: dict[str, list[float]] = defaultdict(list, tokens=[7], loss=[1.0])
    with noted(lambda: metrics) as added:
        metrics["tokens"] = [9]
        metrics["loss"].append(2.0)
        metrics["new"].append(3.0)
    assert added == {"tokens": None, "loss": 2.0, "new": 3.0}


class SFTTrainer:  # one of TRL's by its module
    def __init__(self, metrics: dict[str, list[float]]) -> None:
        self._metrics = {"train": metrics}
        twice = lambda counted: torch.cat([counted, counted])  # noqa: E731
        self.accelerator: Any = SimpleNamespace(device="cpu", gather_for_metrics=twice)


SFTTrainer.__module__ = "trl.trainer"


@pytest.mark.parametrize("everyones", [True, False])
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # Halves of two batches of two rows.
        ([((0,), 1.0, 1), ((1,), 4.0, 2), ((2,), 5.0, 1), ((3,), 7.0, 1)], [3.0, 6.0]),
        # All rows at once: the value of each batch.
        ([((0, 1, 2, 3), 2.0, 4)], [2.0, 2.0]),
    ],
)
def test_each_batch_has_a_value(parts: list[Any], expected: list[float], everyones: bool) -> None:
    before = {"entropy": [9.0], "tokens": [1.0]}
    trainer = SFTTrainer(copy.deepcopy(before))
    trainer._metrics["train"] |= {
        "entropy": [9.0, *(value for _, value, _ in parts)],
        "tokens": [5.0],
    }
    made = [
        Part(rows, {"entropy": value, "tokens": None}, {"labels": torch.ones(1, 1 + labels)})
        for rows, value, labels in parts
    ]
    averages.settle(trainer, "train", before, [2, 2], made, everyones)
    assert trainer._metrics["train"] == {"entropy": [9.0, *expected], "tokens": [5.0]}


def test_each_batch_logs_once() -> None:
    parts = [
        Part([0], logs=[{"mine": 1.0, "name": "a"}, {"other": 1}]),
        Part([1, 2, 3], logs=[{"mine": 5.0, "name": "b"}]),
    ]
    assert logs_of_batches(2, parts) == [{"mine": 4.0, "name": "a"}, {"other": 1.0}] * 2
    assert logs_of_batches(2, []) == []
