"""The packer of a run, and the lengths at which a budget is measured."""

from __future__ import annotations

import random

import numpy as np
import pytest
from torchtune.data import padded_collate_sft

from torchtune_adaptive.core.rows.micro_batches import ByTokens
from torchtune_adaptive.core.sizes.packing import Budget
from torchtune_adaptive.recipe.search.in_tokens import lengths_to_measure
from torchtune_adaptive.recipe.search.token_budget import (
    best_throughputs,
    is_slower,
    length_buckets,
)

PADDING, IGNORED = 7, -100


def test_lengths_halve_from_the_longest_to_the_median() -> None:
    assert lengths_to_measure([10] * 9 + [400], longest=400) == [400, 200, 100, 50, 25, 12]
    assert lengths_to_measure([300, 390, 400], longest=400) == [400]


def test_a_compiled_model_sees_few_lengths_and_nothing_is_over_budget() -> None:
    numbers = random.Random(0)
    lengths = [numbers.randint(5, 1000) for _ in range(400)]
    budget = Budget.of_tokens(4000, 1000)
    buckets = length_buckets(1000, min(lengths))
    packer = ByTokens(budget, np.array(lengths), PADDING, IGNORED, buckets)
    seen = set()
    for start in range(0, 400, 40):
        step = list(range(start, start + 40))
        for rank in range(2):
            for portion in packer.portions(step, packer.budget.tokens, rank, 2):
                rows = [
                    {"tokens": [1] * lengths[i], "labels": [1] * lengths[i]}
                    for i in portion.sample_ids
                ]
                batch = padded_collate_sft(rows, padding_idx=PADDING, ignore_idx=IGNORED)  # type: ignore[arg-type]
                packer.finish(batch)  # type: ignore[arg-type]
                count, length = batch["tokens"].shape
                seen.add(length)
                assert count <= budget.rows(length)
                real = sum(lengths[i] for i in portion.sample_ids)
                assert int((batch["labels"] != IGNORED).sum()) == real
                assert batch["labels"].shape == batch["tokens"].shape
                longest = max(lengths[i] for i in portion.sample_ids)
                assert bool((batch["tokens"][:, longest:] == PADDING).all())
    assert seen <= set(buckets) and len(buckets) <= 8


def test_a_rank_without_rows_runs_one_that_weighs_nothing() -> None:
    packer = ByTokens(Budget.of_tokens(100, 50), np.array([50, 20]), PADDING, IGNORED)
    portions = [packer.portions([0, 1], packer.budget.tokens, rank, 3) for rank in range(3)]
    assert [len(each) for each in portions] == [1, 1, 1]
    ((empty,),) = [each for each in portions if each[0].weightless]
    assert empty.sample_ids == [1], "the shortest will do"


@pytest.mark.parametrize(
    ("without", "with_budget", "rounds", "slower"),
    [
        ([90, 100], [100, 130], 2, False),
        ([100, 90], [60, 96], 2, False),  # a slow first step, and within the margin
        ([100, 100, 100, 100], [70, 80, 94, 94], 4, True),
        ([100, 100, 100], [70, 80, 95], 3, False),
        ([None], [50], 1, False),  # without a budget it does not fit
        ([100], [None], 1, False),
    ],
)
def test_a_budget_is_given_up_only_if_it_is_clearly_and_repeatedly_slower(
    without: list[float | None], with_budget: list[float | None], rounds: int, slower: bool
) -> None:
    taken = [iter(without), iter(with_budget)]
    best = best_throughputs(lambda: next(taken[0]), lambda: next(taken[1]))
    assert is_slower(*best) is slower
    assert len(without) == rounds and [list(rest) for rest in taken] == [[], []], "all were taken"
