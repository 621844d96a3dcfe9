"""The worst case: where the row length of trials comes from, and what a row of that length looks like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchtune.data import padded_collate_sft

from torchtune_adaptive.errors import EmptyTrial
from torchtune_adaptive.search import worst_case as worst_case_module
from torchtune_adaptive.search.worst_case import worst_case


class OneRank:
    rank, size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


class Lengths:
    """A dataset of rows with the lengths given, the first half of each masked."""

    def __init__(self, lengths: list[int], **attributes: Any) -> None:
        self.lengths = lengths
        self.read: list[int] = []
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        self.read.append(index)
        length = self.lengths[index]
        labels = [-100] * (length // 2) + list(range(length - length // 2))
        return {"tokens": list(range(length)), "labels": labels}


class Tokenizer:
    def __init__(self, max_seq_len: int | None = None) -> None:
        self.max_seq_len = max_seq_len


def find(
    dataset: Any, tokenizer: Any = None, packed: bool = False, asked: int | None = None
) -> Any:
    return worst_case(dataset, tokenizer or Tokenizer(), packed, asked, OneRank())  # type: ignore[arg-type]


def test_the_longest_of_all_rows() -> None:
    worst = find(Lengths([5, 9, 3, 12, 7]))
    assert (worst.length, len(worst.row["tokens"])) == (12, 12)
    assert worst.source == "the longest of all 5 rows"


def test_a_large_dataset_is_sampled_evenly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worst_case_module, "MOST_ROWS_SCANNED", 100)
    dataset = Lengths([10 + i % 7 for i in range(1000)])
    worst = find(dataset)
    assert worst.length == 16
    assert len(set(dataset.read)) <= 101
    assert min(dataset.read) < 200 and max(dataset.read) > 800
    assert "100 rows out of 1,000; there may be a longer one" in worst.source
    assert "probe_length" in worst.source


def test_a_slow_dataset_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worst_case_module, "MOST_SECONDS_SCANNED", -1.0)
    worst = find(Lengths([5, 6, 7]))
    assert "0 rows out of 3" in worst.source


def test_max_seq_len_of_the_tokenizer_is_the_length() -> None:
    dataset = Lengths([5, 9])
    worst = find(dataset, Tokenizer(max_seq_len=64))
    assert (worst.length, worst.source) == (64, "max_seq_len of the tokenizer")
    assert dataset.read == [0], "nothing is scanned when the answer is known"


def test_max_seq_len_of_the_dataset_comes_first() -> None:
    worst = find(Lengths([5, 9], max_seq_len=32), Tokenizer(max_seq_len=64))
    assert (worst.length, worst.source) == (32, "max_seq_len of the dataset")


def test_the_user_knows_best() -> None:
    worst = find(Lengths([5, 9]), Tokenizer(max_seq_len=64), asked=40)
    assert (worst.length, worst.source) == (40, "adaptive_batching.probe_length")


def test_packed_rows_are_full() -> None:
    pack = {
        "tokens": torch.arange(16),
        "labels": torch.full((16,), -100),
        "input_pos": torch.arange(16),
        "seq_lens": torch.tensor([10, 6]),
    }
    worst = find([pack], Tokenizer(max_seq_len=999), packed=True, asked=7)
    assert (worst.length, worst.source) == (16, "packed rows are full")
    assert torch.equal(worst.row["seq_lens"], pack["seq_lens"])


def test_a_stretched_row_is_repeated_in_all_that_goes_with_its_tokens() -> None:
    row = {
        "tokens": [1, 2, 3],
        "labels": [-100, 2, 3],
        "mask": [True, False, False],
        "name": "abc",
        "n": 3,
    }
    worst = find([row], asked=7)
    assert worst.row["tokens"] == [1, 2, 3, 1, 2, 3, 1]
    assert worst.row["mask"] == [True, False, False, True, False, False, True]
    assert (worst.row["name"], worst.row["n"]) == ("abc", 3)


@pytest.mark.parametrize("asked", [2, 7, None])
def test_no_label_is_masked_so_that_a_trial_always_trains(asked: int | None) -> None:
    worst = find(Lengths([20]), asked=asked)
    assert worst.row["labels"] == worst.row["tokens"]
    batch = worst.batch(3, padded_collate_sft)
    assert batch["tokens"].shape == (3, worst.length)
    assert not (batch["labels"] == -100).any()


def test_an_empty_dataset_is_an_error() -> None:
    with pytest.raises(EmptyTrial, match="dataset is empty"):
        find([])
