"""Rows: the longest of a dataset, and batches that can be made again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from torchtune_adaptive import UsageError
from torchtune_adaptive.integrations.rows import (
    Keeping,
    KeptRows,
    longest,
    longest_by,
    numbers_in,
    tokens_in,
)

CPU = torch.device("cpu")


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A prompt with each of two answers to it, as DPO has it."""
    both = [row["prompt"] + row[name] for name in ("chosen", "rejected") for row in rows]
    length = max(map(len, both))
    return {"tokens": torch.tensor([each + [0] * (length - len(each)) for each in both])}


def preferences(*lengths: tuple[int, int, int]) -> list[dict[str, list[int]]]:
    names = ("prompt", "chosen", "rejected")
    return [dict(zip(names, ([1] * n for n in row), strict=True)) for row in lengths]


def test_the_longest_row_is_the_one_that_makes_the_largest_batch() -> None:
    # The largest sum is the second's, the longest prompt the third's, the longest answer the fourth's.
    rows = preferences((1, 1, 1), (4, 6, 6), (8, 1, 1), (1, 1, 9), (5, 1, 7))
    assert longest(rows, padded, CPU) == rows[4]
    assert longest_by({"a": [1, 3, 2], "b": [0, 0, 5]}) == {1, 2}


@pytest.mark.exhaustive  # to import datasets takes seconds
def test_the_longest_row_of_a_table_is_found_without_loading_rows() -> None:
    from datasets import Dataset

    rows = preferences((1, 1, 1), (4, 6, 6), (8, 1, 1), (1, 1, 9), (5, 1, 7))
    table = Dataset.from_list(rows).select([4, 0, 1, 2, 3])
    assert longest(table, padded, CPU) == rows[4]
    assert (
        longest(table.with_format("torch"), lambda rows: padded(_lists(rows)), CPU)[
            "chosen"
        ].numel()
        == 1
    )


@pytest.mark.exhaustive
def test_rows_of_a_table_that_are_text_are_measured_by_their_characters() -> None:
    from datasets import Dataset

    def said(*words: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"text": word, "type": "text"}]} for word in words]

    rows = [
        {"messages": said("a", "b", "c", "d", "e", "f"), "images": ["x"]},
        {"messages": said("a" * 200), "images": ["x"]},
        {"messages": said("a" * 30), "images": ["x"]},
        {"messages": None, "images": []},
    ]

    def collate(some: list[Any]) -> torch.Tensor:
        turns = [turn for row in some for turn in row["messages"] or ()]
        return torch.zeros(sum(len(part["text"]) for turn in turns for part in turn["content"]))

    assert longest(Dataset.from_list(rows), collate, CPU) == rows[1]
    texts = Dataset.from_list([{"text": "a" * n, "number": 1} for n in (3, 9, 4)])
    count = lambda some: torch.zeros(sum(len(row["text"]) for row in some))  # noqa: E731
    assert len(longest(texts, count, CPU)["text"]) == 9


def _lists(rows: list[dict[str, torch.Tensor]]) -> list[dict[str, list[int]]]:
    return [{name: value.tolist() for name, value in row.items()} for row in rows]


def test_of_other_rows_the_longest_is_the_one_with_most_numbers() -> None:
    rows = [torch.zeros(length) for length in (3, 7, 5)]
    assert longest(rows, torch.stack, CPU) is rows[1]
    assert longest([1, 2], torch.tensor, CPU) in (1, 2), "rows of no length are alike"
    labelled = [{"label": torch.tensor(1), "x": torch.zeros(length)} for length in (3, 7, 5)]
    assert longest(labelled, lambda rows: rows[0]["x"], CPU) is labelled[1]


class Drawing(Dataset[list[int]]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, at: int) -> list[int]:
        random.random()
        return [0] * at


def test_to_look_for_it_draws_no_random_numbers() -> None:
    state = random.getstate()
    assert len(longest(Drawing(), torch.tensor, CPU)) == 8
    assert random.getstate() == state


def test_rows_outlive_a_collate_function_that_empties_them() -> None:
    def emptying(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"x": torch.tensor([row.pop("x") for row in rows])}

    keeping = Keeping(emptying)
    batch = keeping([{"x": 1}, {"x": 2}])
    assert batch.rows == [{"x": 1}, {"x": 2}] and batch.inputs["x"].tolist() == [1, 2]
    assert keeping.again(batch.rows[:1])["x"].tolist() == [1]
    keeping.require_repeatable(batch, CPU)


def test_a_collate_function_that_masks_at_random_is_refused() -> None:
    for random_batch in (
        lambda: {"input": [torch.tensor([1]), torch.rand(3)]},
        lambda: {"input": np.random.rand(3)},
        lambda: Batch(torch.rand(3)),
        lambda: Slotted(torch.rand(3)),
        lambda: {"text": str(random.random()), "number": 1},
        lambda: [random.random()],
    ):
        keeping = Keeping(lambda rows, made=random_batch: made())  # type: ignore[misc]
        with pytest.raises(UsageError, match=r"data_collator: function makes another batch"):
            keeping.require_repeatable(keeping([1, 2]), CPU)


@dataclass
class Batch:
    """A batch that is no mapping."""

    x: Any


@dataclass
class Slotted:
    __slots__ = ("x",)
    x: Any


class Opaque:
    __slots__ = ("x",)


def test_a_batch_that_is_made_again_is_the_same_with_nan_and_whatever_it_is_made_of() -> None:
    def collate(rows: list[int]) -> dict[str, Any]:
        nan = torch.tensor([1.0, float("nan")])
        text = [np.array(["a", "b"]), "text", None, {1, 2}, float("nan"), len, lambda: 0]
        return {"x": nan, "y": nan.numpy().copy(), "z": Batch(nan.clone()), "others": text}

    keeping = Keeping(collate)
    keeping.require_repeatable(keeping([1]), CPU)


def test_a_batch_that_cannot_be_compared_is_refused_by_its_type() -> None:
    keeping = Keeping(lambda rows: {"x": Opaque()})
    with pytest.raises(UsageError, match=r"data_collator: function puts a Opaque into its batches"):
        keeping.require_repeatable(keeping([1]), CPU)


def test_to_look_whether_a_batch_is_the_same_draws_no_random_numbers() -> None:
    def drawing(rows: list[int]) -> torch.Tensor:
        random.random(), np.random.rand(), torch.rand(1)
        return torch.tensor(rows)

    keeping = Keeping(drawing)
    batch, seeds = (
        keeping([1]),
        (random.getstate(), torch.get_rng_state(), np.random.get_state()[1]),
    )
    keeping.require_repeatable(batch, CPU)
    assert random.getstate() == seeds[0] and torch.equal(torch.get_rng_state(), seeds[1])
    assert np.array_equal(np.random.get_state()[1], seeds[2])


def test_a_loader_that_looks_into_a_batch_is_told_so() -> None:
    batch = Keeping(torch.tensor)([1, 2])
    with pytest.raises(UsageError, match=r"get_train_dataloader: your loader looks into a batch"):
        batch["input_ids"]


def test_numbers_of_nested_batches() -> None:
    assert (
        numbers_in({"a": [torch.zeros(2), torch.zeros(3)], "b": {"c": torch.zeros(1)}, "d": "x"})
        == 6
    )
    assert tokens_in({"input_ids": torch.zeros(2, 5), "labels": torch.zeros(2)}) == 10
    assert tokens_in([]) == 0
    assert isinstance(Keeping(list)([1]), KeptRows)
