"""Samples: torchtune's order, each of them once, in whatever portions they are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from torchtune_adaptive.sampler import Loader, SampleOrder


@pytest.mark.parametrize("samples", [1, 2, 7, 64, 103])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_is_torchtunes(samples: int, ranks: int, shuffle: bool) -> None:
    order = SampleOrder(samples, ranks, shuffle)
    for epoch in range(3):
        for rank in range(ranks):
            sampler = StatefulDistributedSampler(range(samples), ranks, rank, shuffle)  # type: ignore[arg-type]
            sampler.set_epoch(epoch)
            assert order.epoch(epoch)[rank::ranks] == list(sampler)
        assert order.rows_per_rank == len(sampler)


def loader(samples: int = 20, rank: int = 0, ranks: int = 1) -> Loader:
    def collate(rows: list[int]) -> dict[str, Any]:
        return {"rows": torch.tensor(rows)}

    dataset: Any = [index * 10 for index in range(samples)]
    return Loader(dataset, collate, SampleOrder(samples, ranks, shuffle=True), rank, ranks)


def test_a_micro_batch_knows_its_samples() -> None:
    for micro_batch in loader().micro_batches(epoch=0, rows=4):
        assert (micro_batch.batch["rows"] // 10).tolist() == list(micro_batch.sample_ids)


def ids(bringing: Loader, rows: int, start: int = 0) -> list[int]:
    return [i for batch in bringing.micro_batches(0, rows, start) for i in batch.sample_ids]


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 20])
def test_the_order_does_not_depend_on_the_portions(rows: int) -> None:
    every = loader().order.epoch(0)
    assert ids(loader(), rows) == every[: 20 // rows * rows]


def test_the_size_can_change_in_mid_epoch_without_losing_a_sample() -> None:
    bringing = loader()
    taken = [i for batch in list(bringing.micro_batches(0, rows=2))[:3] for i in batch.sample_ids]
    taken += ids(bringing, rows=7, start=6)
    assert taken == loader().order.epoch(0)


def test_every_sample_goes_to_one_rank() -> None:
    everyone = [i for rank in range(4) for i in ids(loader(20, rank, 4), rows=1)]
    assert sorted(everyone) == list(range(20))


def test_bringing_samples_draws_nothing_from_the_runs_generator() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(loader().micro_batches(0, rows=3))
    assert torch.equal(before, torch.get_rng_state())
