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
    sliced,
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
    assert longest(rows, Keeping(padded), CPU) == rows[4]
    assert longest_by({"a": [1, 3, 2], "b": [0, 0, 5]}) == {1, 2}


@pytest.mark.exhaustive  # to import datasets takes seconds
def test_the_longest_row_of_a_table_is_found_without_loading_rows() -> None:
    from datasets import Dataset

    rows = preferences((1, 1, 1), (4, 6, 6), (8, 1, 1), (1, 1, 9), (5, 1, 7))
    table = Dataset.from_list(rows).select([4, 0, 1, 2, 3])
    assert longest(table, Keeping(padded), CPU) == rows[4]
    assert (
        longest(table.with_format("torch"), Keeping(lambda rows: padded(_lists(rows))), CPU)[
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

    assert longest(Dataset.from_list(rows), Keeping(collate), CPU) == rows[1]
    texts = Dataset.from_list([{"text": "a" * n, "number": 1} for n in (3, 9, 4)])
    count = lambda some: torch.zeros(sum(len(row["text"]) for row in some))  # noqa: E731
    assert len(longest(texts, Keeping(count), CPU)["text"]) == 9


def _lists(rows: list[dict[str, torch.Tensor]]) -> list[dict[str, list[int]]]:
    return [{name: value.tolist() for name, value in row.items()} for row in rows]


def test_of_other_rows_the_longest_is_the_one_with_most_numbers() -> None:
    rows = [torch.zeros(length) for length in (3, 7, 5)]
    assert longest(rows, Keeping(torch.stack), CPU) is rows[1]
    assert longest([1, 2], Keeping(torch.tensor), CPU) in (1, 2), "rows of no length are alike"
    labelled = [{"label": torch.tensor(1), "x": torch.zeros(length)} for length in (3, 7, 5)]
    assert longest(labelled, Keeping(lambda rows: rows[0]["x"]), CPU) is labelled[1]


def test_of_rows_that_are_longest_in_something_it_is_the_one_with_most_numbers() -> None:
    def widest(some: list[dict[str, list[int]]]) -> torch.Tensor:
        return torch.zeros(sum(len(value) for row in some for value in row.values()))

    rows = [{"a": [0] * 5, "b": [0]}, {"a": [0], "b": [0] * 5}, {"a": [0] * 4, "b": [0] * 4}]
    assert longest(rows, Keeping(widest), CPU) is rows[2]


class Drawing(Dataset[list[int]]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, at: int) -> list[int]:
        random.random()
        return [0] * at


def test_to_look_for_it_draws_no_random_numbers() -> None:
    state = random.getstate()
    assert len(longest(Drawing(), Keeping(torch.tensor), CPU)) == 8
    assert random.getstate() == state


def test_a_transform_of_a_table_keeps_its_generator() -> None:
    from datasets import Dataset

    class Augmenting:
        drawn = random.Random(0)

        def __call__(self, batch: dict[str, list[Any]]) -> dict[str, Any]:
            self.drawn.random()
            return {"x": [torch.zeros(length) for length in batch["x"]]}

    augmenting = Augmenting()
    augmenting.drawn = random.Random(0)
    table = Dataset.from_dict({"x": [3, 9, 4]}).with_transform(augmenting)
    assert len(longest(table, Keeping(lambda rows: rows[0]["x"]), CPU)["x"]) == 9
    assert augmenting.drawn.getstate() == random.Random(0).getstate()


def test_rows_outlive_a_collate_function_that_empties_them() -> None:
    def emptying(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"x": torch.tensor([row.pop("x") for row in rows])}

    keeping = Keeping(emptying)
    batch = keeping([{"x": 1}, {"x": 2}])
    assert batch.rows == [{"x": 1}, {"x": 2}] and batch.inputs["x"].tolist() == [1, 2]
    assert keeping.again(batch.rows[:1])["x"].tolist() == [1]
    assert keeping.repeats(batch, CPU)


def test_a_collate_function_that_draws_does_not_make_the_same_batch_again() -> None:
    for random_batch in (
        lambda: {"input": [torch.tensor([1]), torch.rand(3)]},
        lambda: {"input": np.random.rand(3)},
        lambda: Batch(torch.rand(3)),
        lambda: Slotted(torch.rand(3)),
        lambda: {"text": str(random.random()), "number": 1},
        lambda: [random.random()],
    ):
        keeping = Keeping(lambda rows, made=random_batch: made())  # type: ignore[misc]
        assert not keeping.repeats(keeping([1, 2]), CPU)


class Masking:
    """Draws by generators of its own."""

    columns = ("x",)

    def __init__(self) -> None:
        self.generators = torch.Generator(), np.random.default_rng(0), random.Random(0)
        self.of_torch, self.of_numpy, self.of_python = self.generators

    def __call__(self, rows: list[int]) -> torch.Tensor:
        by_torch = torch.rand((), generator=self.of_torch)
        return torch.tensor(rows) + by_torch + self.of_numpy.random() + self.of_python.random()


def test_generators_of_a_collate_function_are_left_as_they_are() -> None:
    plain, keeping = Masking(), Keeping(Masking())
    for number in range(3):
        batch = keeping([number])
        assert torch.equal(batch.inputs, plain([number]))
        assert not keeping.repeats(batch, CPU)
        keeping.again([number])
        with keeping.apart():
            keeping([number])
    assert keeping.columns == ("x",), "a trainer may ask its collate function"


def test_parts_of_a_batch_are_as_the_loader_made_them() -> None:
    batch = {
        "x": torch.arange(6).view(3, 2),
        "boxes": [{"at": 0}, {"at": 1}, {"at": 2}],
        "nested": {"y": np.arange(3)},
        "return_loss": True,
        "scale": torch.tensor(2.0),
    }
    part = sliced(batch, [2, 0], 3)
    assert part["x"].tolist() == [[4, 5], [0, 1]] and part["boxes"] == [{"at": 2}, {"at": 0}]
    assert part["nested"]["y"].tolist() == [2, 0]
    assert (part["return_loss"], float(part["scale"])) == (True, 2.0)
    part["x"].zero_()
    assert batch["x"].sum() == 15, "a step may change what it is given"
    of_columns = sliced([torch.arange(2), torch.ones(2, 3)], [1], 2)
    assert [each.tolist() for each in of_columns] == [[1], [[1.0] * 3]]
    for unknown in (
        {"x": torch.zeros(1, 12)},
        {"x": [torch.zeros(2), torch.zeros(2)]},
        {"x": ["a"] * 3},
    ):
        with pytest.raises(ValueError, match=r"in a batch of 2 rows"):
            sliced(unknown, [0], 2)


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
    assert keeping.repeats(keeping([1]), CPU)


def test_a_batch_that_cannot_be_compared_is_not_made_again() -> None:
    keeping = Keeping(lambda rows: {"x": Opaque()})
    assert not keeping.repeats(keeping([1]), CPU)


def test_to_look_whether_a_batch_is_the_same_draws_no_random_numbers() -> None:
    def drawing(rows: list[int]) -> torch.Tensor:
        random.random(), np.random.rand(), torch.rand(1)
        return torch.tensor(rows)

    keeping = Keeping(drawing)
    batch, seeds = (
        keeping([1]),
        (random.getstate(), torch.get_rng_state(), np.random.get_state()[1]),
    )
    assert keeping.repeats(batch, CPU)
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
