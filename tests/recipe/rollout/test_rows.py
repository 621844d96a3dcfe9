"""Rows become batches, padded on the right."""

from __future__ import annotations

import torch

from tests.helpers.rollouts import answered
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.recipe.rollout.rows import Row, collate, longest_rows, on_host


def row(prompt: list[int], response: list[int], **numbers: torch.Tensor | float) -> Row:
    return Row(0, prompt, torch.rand(4), response=torch.tensor(response), **numbers)  # type: ignore[arg-type]


def test_what_belongs_to_a_prediction_stands_where_it_is_made() -> None:
    rows = [
        row([5, 6, 7], [8, 9], old=torch.tensor([1.0, 2.0]), advantages=0.5),
        row([4], [3, 2, 1], old=torch.tensor([3.0, 4.0, 5.0]), advantages=-1.0),
    ]
    batch = collate(rows, 0)
    assert {name: numbers.tolist() for name, numbers in batch.items()} == {
        "tokens": [[5, 6, 7, 8, 9], [4, 3, 2, 1, 0]],
        "response": [[False, False, True, True, False], [True, True, True, False, False]],
        "old": [[0, 0, 1, 2, 0], [3, 4, 5, 0, 0]],
        "advantages": [[0, 0, 0.5, 0.5, 0], [-1, -1, -1, 0, 0]],
    }


def test_values_stand_before_each_token_and_after_the_last_where_that_counts() -> None:
    rows = [
        row([5, 6], [8, 9], values=torch.tensor([1.0, 2.0, 3.0])),
        row([4, 3], [2, 1], values=torch.tensor([4.0, 5.0])),
    ]
    batch = collate(rows, 0)
    assert batch["values"].tolist() == [[0, 1, 2, 3], [0, 4, 5, 0]]
    assert batch["valued"].tolist() == [[False, True, True, True], [False, True, True, False]]


def test_the_longest_rows_are_as_long_as_rows_can_be() -> None:
    rows = longest_rows(3, 4, 5, values=True)
    batch = collate(rows, 0)
    assert {numbers.shape for numbers in batch.values()} == {(3, 9)}
    assert {*batch} == {*collate(rows[:1], 0)} and int(batch["response"].sum()) == 15
    assert len(rows[0].draws) == 5 and "values" not in collate(longest_rows(1, 4, 5), 0)


def test_a_copy_on_the_host_takes_no_memory_of_a_simulated_device() -> None:
    memory = SimulatedMemory(1 << 20)
    with memory.running():
        made = torch.ones(1000)
        kept = on_host(made)
        counted = memory.in_use()
        part = kept[:10]
        del made
    assert counted == 4000 and memory.in_use() == 0 and float(part.sum()) == 10.0


def test_rows_of_all_lengths_are_collated() -> None:
    rows = answered(5)
    batch = collate(rows, 0)
    assert batch["response"].sum(1).tolist() == [len(each.old) for each in rows]  # type: ignore[arg-type]
    assert torch.equal(batch["old"][batch["response"]], torch.cat([each.old for each in rows]))  # type: ignore[misc]
