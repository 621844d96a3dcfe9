"""A run with nothing to learn stops before its search, whichever rank looks."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchtune.data import padded_collate_sft

from tests.helpers.ranks import Alone
from torchtune_adaptive.common.errors import ConfigError, NothingToLearn
from torchtune_adaptive.core.step.objective import NextTokenPrediction
from torchtune_adaptive.recipe.data.dataset import Data
from torchtune_adaptive.recipe.train.learnable import MOST_SAMPLES, require_something_to_learn

LEARNABLE = {"tokens": [1, 2, 3], "labels": [-100, -100, 3]}
MASKED = {"tokens": [1, 2, 3], "labels": [-100, -100, -100]}
ONE_TOKEN = {"tokens": [1], "labels": [1]}


class Rows:
    """A dataset that draws random numbers, as one that augments its samples would."""

    def __init__(self, rows: list[dict[str, list[int]]]) -> None:
        self.rows = rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        random.random(), np.random.random(), torch.rand(())
        self.read.append(index)
        return self.rows[index]


class Rank(Alone):
    """One of two; the other finds something, or does not."""

    def __init__(self, rank: int, other_finds: bool) -> None:
        self.rank, self.size = rank, 2
        self.other_finds = other_finds

    def any(self, flag: bool) -> bool:
        return flag or self.other_finds


def check(rows: Rows, ranks: Alone | None = None, max_seq_len: int | None = None) -> None:
    collate = partial(padded_collate_sft, padding_idx=0, ignore_idx=-100)
    tokenizer = SimpleNamespace(max_seq_len=max_seq_len)
    step = SimpleNamespace(
        ranks=ranks or Alone(),
        device=torch.device("cpu"),
        objective=NextTokenPrediction(nn.CrossEntropyLoss()),
    )
    require_something_to_learn(Data(rows, tokenizer, collate), step)  # type: ignore[arg-type]


def test_usually_one_sample_settles_it() -> None:
    rows = Rows([LEARNABLE] * 100)
    check(rows)
    assert len(rows.read) == 1


@pytest.mark.parametrize("at", [0, 17, 39])
def test_one_sample_is_enough(at: int) -> None:
    check(Rows([MASKED] * at + [LEARNABLE] + [MASKED] * (39 - at)))


@pytest.mark.parametrize("row", [MASKED, ONE_TOKEN], ids=["masked", "of one token"])
def test_nothing_to_learn_ends_the_run_with_the_reason(row: dict[str, Any]) -> None:
    with pytest.raises(NothingToLearn) as raised:
        check(Rows([row] * 40), max_seq_len=1)
    message = str(raised.value)
    assert message.startswith("dataset: looked at 40 of 40 samples, and none has a token")
    assert "-100" in message and "tokenizer.max_seq_len (1)" in message


def test_the_limit_of_the_tokenizer_is_named_only_if_there_is_one() -> None:
    with pytest.raises(NothingToLearn) as raised:
        check(Rows([MASKED]))
    assert "max_seq_len" not in str(raised.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_finds_is_enough_for_all(rank: int) -> None:
    rows = Rows([MASKED] * 100)
    check(rows, Rank(rank, other_finds=True))
    assert len(rows.read) == 8, "and no rank waits for long"
    with pytest.raises(NothingToLearn):
        check(Rows([MASKED] * 100), Rank(rank, other_finds=False))


def test_the_look_is_bounded_and_spread_over_the_dataset() -> None:
    rows = Rows([MASKED] * 20 * MOST_SAMPLES)
    with pytest.raises(NothingToLearn, match="looked at 1,000 of 20,000 samples"):
        check(rows)
    assert len(set(rows.read)) == len(rows.read) == MOST_SAMPLES
    assert min(rows.read) < MOST_SAMPLES and max(rows.read) > 19 * MOST_SAMPLES


def test_random_numbers_continue_as_if_nothing_had_been_read() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = drawn()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    check(Rows([MASKED] * 20 + [LEARNABLE]))
    assert drawn() == expected


def test_an_empty_dataset_is_not_its_business() -> None:
    check(Rows([]))


def test_rows_of_another_recipe_are_refused() -> None:
    pair = {"chosen_input_ids": [1], "chosen_labels": [1], "rejected_input_ids": [2]}
    with pytest.raises(ConfigError, match="chosen and a rejected answer, which only preference"):
        check(Rows([pair]))  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="has rows of text; this recipe needs tokens, labels"):
        check(Rows([{"text": "a"}]))  # type: ignore[list-item]
