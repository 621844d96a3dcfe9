"""What rows cost each rank: bytes for its own share, and a fixed number in a checkpoint."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from tests.helpers.ranks import Alone
from torchtune_adaptive.core.rows.loader import Loader
from torchtune_adaptive.core.rows.micro_batches import ByRows, ByTokens
from torchtune_adaptive.core.rows.order import SampleOrder
from torchtune_adaptive.core.sizes.packing import Budget
from torchtune_adaptive.core.step.generators import Generators
from torchtune_adaptive.recipe.data.row_lengths import RowLengths

ROWS, RANKS = 10_000_000, 4096


def kept(samples: Any) -> int:
    """The bytes of an array, with those that it is a part of."""
    base = samples
    while isinstance(getattr(base, "base", None), np.ndarray):
        base = base.base
    return int(base.nbytes)


def test_a_rank_keeps_four_bytes_for_each_of_its_own_samples() -> None:
    order = SampleOrder(ROWS, RANKS, shuffle=True)
    tracemalloc.start()
    for rank in (0, RANKS - 1):
        mine: Any = order.share(0, rank, RANKS)
        assert len(mine) == order.rows_per_rank == 2442
        assert kept(mine) == 4 * order.rows_per_rank
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2 * 4 * order.rows_per_rank + 50_000, "but for torch's own random order"


def test_with_a_token_budget_it_keeps_four_bytes_for_each_sample_of_all_ranks() -> None:
    everyones: Any = SampleOrder(ROWS, 64, shuffle=True).epoch(0)
    assert kept(everyones) == 4 * ROWS


def test_data_in_their_own_order_and_a_streamed_order_take_no_memory() -> None:
    tracemalloc.start()
    for order in (
        SampleOrder(10**9, RANKS, shuffle=False),
        SampleOrder(10**9, RANKS, shuffle=True, streaming=True),
    ):
        middle = order.share(3, 17, RANKS, used=5 * 10**8)
        assert len(middle[1000:1008].tolist()) == 8
        assert len(order.epoch(3)[10**6 : 10**6 + 4096].tolist()) == 4096
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_step_of_a_rank_makes_no_more_than_its_own_samples() -> None:
    """Those of all ranks are ``RANKS`` times as many."""
    asked: list[int] = []

    class Watched(SampleOrder):
        def share(self, epoch: int, rank: int, ranks: int, used: int = 0) -> Any:
            asked.append(ranks)
            return super().share(epoch, rank, ranks, used)

    dataset: Any = range(ROWS)
    order = Watched(ROWS, RANKS, shuffle=True, streaming=True)
    rows = Loader(
        dataset, lambda rows: {"tokens": torch.tensor([rows])}, order, 5, RANKS, ByRows("none")
    )
    (batch,) = rows.epoch(0, used=RANKS * 1000).step(2 * RANKS, 2)
    assert asked == [RANKS]
    everyones = SampleOrder(ROWS, RANKS, shuffle=True, streaming=True).epoch(0)
    first = RANKS * 1000
    assert batch["tokens"].tolist() == [everyones[first + 5 : first + 2 * RANKS : RANKS].tolist()]


def test_lengths_in_a_file_stay_there(tmp_path: Any) -> None:
    lengths = np.lib.format.open_memmap(tmp_path / "lengths.npy", "w+", np.int32, (ROWS,))
    lengths[:] = 7
    tracemalloc.start()
    micro_batches = ByTokens(Budget.of_tokens(70, 7), lengths, 0, -100)
    assert [len(each.sample_ids) for each in micro_batches.portions([*range(20)], 70, 0, 2)] == [10]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000 and isinstance(micro_batches.row_lengths, np.memmap)


def test_lengths_are_sent_in_four_bytes_each_and_only_to_rank_zero() -> None:
    sent: list[torch.Tensor] = []

    class Watched(Alone):
        def gather(self, value: Any) -> list[Any]:
            raise AssertionError("a list of numbers on every rank")

        def gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor | None:
            sent.append(tensor)
            return super().gather_tensor(tensor) if self.rank == 0 else None

    rows, ranks = 100_003, Watched(64)
    dataset = [{"tokens": [0] * 3}] * rows
    lengths = RowLengths(dataset, OmegaConf.create(), ranks, cache=False).all(say_progress=False)
    assert (len(lengths), lengths.dtype) == (rows, np.int32)
    assert [each.nbytes for each in sent] == [4 * (rows // 64 + 1)]


def test_random_states_of_all_ranks_are_ten_kilobytes_each_in_a_checkpoint() -> None:
    mine = Generators(torch.device("cpu")).as_bytes()
    everyones = Alone(RANKS).gather_tensor(mine)
    assert everyones is not None and everyones.dtype == torch.uint8
    assert everyones.shape == (RANKS, len(mine)) and len(mine) < 10_300
