"""The worst case: where the row length of trials comes from, and what a row of that length looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import IterableDataset
from torchtune.data import padded_collate_sft

from tests.helpers.ranks import Alone
from torchtune_adaptive.common.errors import ConfigError, EmptyTrial
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.recipe.data.dataset import Data, load_rows
from torchtune_adaptive.recipe.data.row_lengths import RowLengths
from torchtune_adaptive.recipe.data.rows import TokenRows
from torchtune_adaptive.recipe.search import worst_case as worst_case_module
from torchtune_adaptive.recipe.search.worst_case import WorstCase, worst_case
from torchtune_adaptive.recipe.settings.asked import Asked

CFG = OmegaConf.create({"dataset": {"source": "a"}, "tokenizer": {"path": "b"}})


class Together(Ranks):
    """A rank in a thread."""

    def __init__(self, rank: int, values: list[Any], barrier: Barrier) -> None:
        self.rank, self.size = rank, len(values)
        self._values, self._barrier = values, barrier

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        gathered = list(self._values)
        self._barrier.wait()
        return gathered

    def from_rank_zero(self, value: Any) -> Any:
        return self.gather(value)[0]

    def any(self, flag: bool) -> bool:
        return any(self.gather(flag))

    def gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor | None:
        gathered = torch.stack(self.gather(tensor))
        return gathered if self.rank == 0 else None

    def fill_from_rank_zero(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self.from_rank_zero(tensor.clone()))


def in_threads(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    values, barrier = [None] * size, Barrier(size, timeout=300)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Together(rank, values, barrier)), range(size)))


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
    dataset: Any,
    tokenizer: Any = None,
    packed: bool = False,
    asked: int | None = None,
    ranks: Any = None,
    cache: Path | None = None,
) -> WorstCase:
    ranks = ranks or Alone()
    lengths = RowLengths(dataset, CFG, ranks, str(cache) if cache else False)
    data = Data(dataset, tokenizer or Tokenizer(), padded_collate_sft, TokenRows(packed))
    return worst_case(data, asked, ranks, lengths)


def test_the_longest_of_all_rows() -> None:
    worst = find(Lengths([5, 9, 3, 12, 7]))
    assert (worst.length, len(worst.row["tokens"])) == (12, 12)
    assert worst.source == "the longest of all 5 rows"
    assert find(Lengths([5])).source == "the only row"


def test_a_large_dataset_is_sampled_evenly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worst_case_module, "MOST_ROWS_SCANNED", 100)
    dataset = Lengths([10 + i % 7 for i in range(1000)])
    worst = find(dataset)
    assert worst.length == 16
    assert len(set(dataset.read)) <= 101
    assert min(dataset.read) < 200 and max(dataset.read) > 800
    assert "100 rows out of 1,000; there may be a longer one" in worst.source
    assert "probe_length" in worst.source


def test_with_a_bound_what_cannot_be_scanned_whole_is_as_long_as_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worst_case_module, "MOST_ROWS_SCANNED", 100)
    worst = find(Lengths([10 + i % 7 for i in range(1000)]), Tokenizer(max_seq_len=64))
    assert (worst.length, len(worst.row["tokens"])) == (64, 64)
    assert worst.source == (
        "max_seq_len of the tokenizer; looking at more than 100 rows out of 1,000 takes too long"
    )


def test_a_scan_that_cannot_end_in_time_is_given_up_early_where_there_is_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(10_000))  # each row takes a second
    monkeypatch.setattr(worst_case_module.time, "monotonic", lambda: next(clock))
    dataset = Lengths([5] * 1000)
    assert find(dataset, Tokenizer(max_seq_len=64)).length == 64
    assert len(dataset.read) < 6
    dataset = Lengths([5] * 1000)
    assert find(dataset).length == 5
    assert 29 < len(dataset.read) < 33, "without a bound, all the time that there is"


def test_a_slow_dataset_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worst_case_module, "MOST_SECONDS_SCANNED", -1.0)
    worst = find(Lengths([5, 6, 7]))
    assert "0 rows out of 3" in worst.source


def test_the_longest_row_counts_and_not_what_the_tokenizer_would_allow() -> None:
    """Trials of ``max_seq_len`` tokens found a fraction of what fits, where no row is nearly that long."""
    worst = find(Lengths([5, 9]), Tokenizer(max_seq_len=64))
    assert worst.length == 9
    assert worst.source == "the longest of all 2 rows; max_seq_len of the tokenizer allows 64"


def test_rows_as_long_as_allowed_settle_it() -> None:
    dataset = Lengths([16] * 500)
    worst = find(dataset, Tokenizer(max_seq_len=16))
    assert worst.length == 16
    assert worst.source == "max_seq_len of the tokenizer, and there are rows that long"
    assert len(dataset.read) == 2, "the scan ends there"


def test_the_bound_of_the_dataset_comes_before_that_of_the_tokenizer() -> None:
    worst = find(Lengths([5, 9], max_seq_len=32), Tokenizer(max_seq_len=64))
    assert (worst.length, worst.source) == (
        9,
        "the longest of all 2 rows; max_seq_len of the dataset allows 32",
    )


def test_ranks_share_the_work_and_agree() -> None:
    lengths = [7 * i % 101 + 1 for i in range(200)]
    found = in_threads(3, lambda ranks: find(Lengths(lengths), ranks=ranks))
    assert {(worst.length, worst.source) for worst in found} == {
        (max(lengths), "the longest of all 200 rows")
    }
    assert len({tuple(worst.row["tokens"]) for worst in found}) == 1


def test_a_complete_scan_is_remembered(tmp_path: Path) -> None:
    lengths = [7 * i % 101 + 1 for i in range(500)]
    assert find(Lengths(lengths), cache=tmp_path).length == 101
    again = Lengths(lengths)
    assert find(again, cache=tmp_path).length == 101
    assert len(again.read) < 100, "a spot check, and the row itself"
    known = RowLengths(again, CFG, Alone(), str(tmp_path)).known()
    assert known is not None and known.tolist() == lengths


def test_the_user_knows_best() -> None:
    worst = find(Lengths([5, 9]), Tokenizer(max_seq_len=64), asked=40)
    assert (worst.length, worst.source) == (40, "adaptive_batching.probe_length")


@pytest.mark.parametrize("bound", [None, 12, 64])
def test_a_row_longer_than_the_user_says_stops_the_run(bound: int | None) -> None:
    with pytest.raises(ConfigError, match=r"probe_length: 8 is shorter than row 1 .*\(12 tokens\)"):
        find(Lengths([5, 12, 3]), Tokenizer(max_seq_len=bound), asked=8)


def test_no_row_is_looked_for_that_the_bound_rules_out() -> None:
    dataset = Lengths([5] * 100)
    assert find(dataset, Tokenizer(max_seq_len=64), asked=64).length == 64
    assert len(dataset.read) == 2


def test_packed_rows_are_full() -> None:
    pack = {
        "tokens": torch.arange(16),
        "labels": torch.full((16,), -100),
        "input_pos": torch.arange(16),
        "seq_lens": torch.tensor([10, 6]),
    }
    worst = find([pack], Tokenizer(max_seq_len=999), packed=True, asked=99)
    assert (worst.length, worst.source) == (16, "packed rows are full")
    assert torch.equal(worst.row["seq_lens"], pack["seq_lens"])
    with pytest.raises(ConfigError, match="7 is shorter than row 0"):
        find([pack], packed=True, asked=7)


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


@pytest.mark.parametrize("asked", [20, 27, None])
def test_no_label_is_masked_so_that_a_trial_always_trains(asked: int | None) -> None:
    worst = find(Lengths([20]), asked=asked)
    batch = worst.batch(3)
    assert batch["tokens"].shape == (3, worst.length)
    assert (batch["labels"] == 0).all(), "not the tokens: those of images are in no vocabulary"


def test_an_empty_dataset_is_an_error() -> None:
    with pytest.raises(EmptyTrial, match="dataset is empty"):
        find([])


class Stream(IterableDataset[Any]):
    def __init__(self, tokenizer: Any) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        yield {"tokens": [1, 2], "labels": [1, 2]}


@pytest.mark.parametrize("several", [False, True])
def test_a_stream_of_rows_is_refused(several: bool) -> None:
    one = {"_component_": f"{__name__}.Stream"}
    tokenizer = {"_component_": f"{__name__}.Tokenizer"}
    cfg = OmegaConf.create({"tokenizer": tokenizer, "dataset": [one] if several else one})
    with pytest.raises(ConfigError, match=r"Stream' streams its rows: .*streaming=False"):
        load_rows(Asked.of(cfg, "full"))
