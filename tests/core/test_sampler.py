"""Samples: torchtune's order, each of them once, in whatever portions they are taken."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch

from torchtune_adaptive.core.rows.loader import EpochRows, Loader
from torchtune_adaptive.core.rows.micro_batches import ByRows
from torchtune_adaptive.core.rows.order import SampleOrder, _dtype_of


@pytest.mark.parametrize("samples", [1, 2, 7, 64, 103])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_is_torchtunes(samples: int, ranks: int, shuffle: bool) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    order = SampleOrder(samples, ranks, shuffle)
    for epoch in range(3):
        for rank in range(ranks):
            sampler = torchdata.StatefulDistributedSampler(range(samples), ranks, rank, shuffle)
            sampler.set_epoch(epoch)
            assert order.share(epoch, rank, ranks).tolist() == list(sampler)
        assert order.rows_per_rank == len(sampler)


def as_a_list(order: SampleOrder, epoch: int) -> list[int]:
    """The samples of an epoch, made in the plainest way."""
    samples = [*range(order.samples)]
    if order.shuffle:
        generator = torch.Generator().manual_seed(order.seed + epoch)
        samples = torch.randperm(order.samples, generator=generator).tolist()
    while missing := order.per_epoch - len(samples):
        samples += samples[:missing]
    return samples


@pytest.mark.parametrize("samples", [1, 2, 7, 24, 103, 5000])
@pytest.mark.parametrize("began_with", [1, 2, 3, 16])
@pytest.mark.parametrize("shuffle", [False, True])
def test_any_rank_of_any_number_knows_its_samples_after_any_place(
    samples: int, began_with: int, shuffle: bool
) -> None:
    order = SampleOrder(samples, began_with, shuffle, seed=5)
    expected = as_a_list(order, 3)
    assert order.epoch(3).tolist() == expected
    for ranks in (1, 2, 3, 5, 40):
        for used in {0, 1, samples // 3, samples - 1, samples, order.per_epoch}:
            for rank in {0, 1 % ranks, ranks - 1}:
                mine = order.share(3, rank, ranks, used)
                assert mine.tolist() == expected[used + rank :: ranks]
                assert len(mine) == len(expected[used + rank :: ranks])
                assert mine[1:3].tolist() == expected[used + rank :: ranks][1:3]


def test_a_streamed_order_has_each_sample_once_and_repeats_the_first_ones() -> None:
    order = SampleOrder(103, 4, shuffle=True, seed=1, streaming=True)
    whole = order.epoch(2).tolist()
    assert sorted(whole[:103]) == [*range(103)] and whole[103:] == whole[:1]
    assert whole != SampleOrder(103, 4, shuffle=True, seed=2, streaming=True).epoch(2).tolist()
    assert whole != order.epoch(3).tolist()
    for rank in range(3):
        assert order.share(2, rank, 3, used=50).tolist() == whole[50 + rank :: 3]


@pytest.mark.parametrize("streaming", [False, True])
def test_steps_after_a_place_that_the_ranks_do_not_divide(streaming: bool) -> None:
    """As after a batch that has grown, on ranks that share the larger one only."""
    dataset: Any = range(40)
    order = SampleOrder(40, 4, shuffle=True, streaming=streaming)
    expected = order.epoch(1).tolist()[20:38]
    parts = [
        take(
            Loader(dataset, collate, order, rank, 3, ByRows("none")).epoch(1, used=20),
            step=18,
            micro_batch=2,
        )
        for rank in range(3)
    ]
    assert parts == [expected[rank::3] for rank in range(3)]


def test_samples_of_more_than_two_thousand_million_have_larger_numbers() -> None:
    assert _dtype_of(2**31 - 1) == torch.int32 and _dtype_of(2**31 + 1) == torch.int64


def collate(rows: list[int]) -> dict[str, Any]:
    return {"tokens": torch.tensor(rows).unsqueeze(1)}


def loader(
    samples: int = 20, rank: int = 0, ranks: int = 1, workers: int = 0, streaming: bool = False
) -> Loader:
    dataset: Any = [index * 10 for index in range(samples)]
    order = SampleOrder(samples, ranks, shuffle=True, streaming=streaming)
    return Loader(dataset, collate, order, rank, ranks, ByRows("none"), workers)


def test_a_micro_batch_knows_its_samples() -> None:
    rows = loader().epoch(0)
    for batch in rows.step(samples=20, size=4):
        brought = rows.loaded[-1]
        assert tuple(batch["tokens"].flatten() // 10) == brought.sample_ids
        assert (brought.rows, brought.tokens) == (4, 4)


def samples_of(rows: EpochRows, *, step: int, micro_batch: int) -> list[tuple[int, ...]]:
    """The samples of each micro-batch of the next step."""
    loaded = len([*rows.step(step, micro_batch)])
    assert loaded == len(rows.loaded)
    return [each.sample_ids for each in rows.loaded]


def take(rows: EpochRows, *, step: int, micro_batch: int) -> list[int]:
    """The samples of the next step, which is then done."""
    taken = samples_of(rows, step=step, micro_batch=micro_batch)
    rows.advance(step)
    return [*chain.from_iterable(taken)]


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 10])
def test_the_order_does_not_depend_on_the_portions(micro_batch: int) -> None:
    rows = loader().epoch(0)
    taken = take(rows, step=10, micro_batch=micro_batch) + take(
        rows, step=10, micro_batch=micro_batch
    )
    assert taken == loader().order.epoch(0).tolist()


def test_the_last_portion_of_a_step_may_be_smaller_and_none_crosses_into_the_next() -> None:
    rows = loader().epoch(0)
    for _ in range(2):
        assert [*map(len, samples_of(rows, step=7, micro_batch=3))] == [3, 3, 1]
        rows.advance(7)


def test_sizes_can_change_at_every_step_without_losing_a_sample() -> None:
    rows = loader().epoch(0)
    taken: list[int] = []
    for step, micro_batch in [(4, 4), (4, 2), (6, 2), (2, 2), (4, 3)]:
        taken += take(rows, step=step, micro_batch=micro_batch)
    assert taken == loader().order.epoch(0).tolist() and rows.used == 20


@pytest.mark.parametrize("seen", [0, 1, 3])
def test_a_step_can_be_taken_again_in_smaller_portions(seen: int) -> None:
    rows = loader().epoch(0)
    first = take(rows, step=6, micro_batch=2)
    lost = rows.step(6, 2)
    for _ in range(seen):
        next(lost)
    again = take(rows, step=6, micro_batch=1)
    assert (
        first + again + take(rows, step=6, micro_batch=2) == loader().order.epoch(0).tolist()[:18]
    )


def test_a_step_can_be_taken_again_in_the_same_portions() -> None:
    rows = loader().epoch(0)
    lost = samples_of(rows, step=6, micro_batch=2)
    assert lost == samples_of(rows, step=6, micro_batch=2)


@pytest.mark.parametrize("streaming", [False, True])
def test_workers_bring_the_same_rows_also_where_sizes_change(streaming: bool) -> None:
    taken = []
    for workers in (0, 2):
        rows = loader(workers=workers, streaming=streaming).epoch(0)
        taken.append([take(rows, step=s, micro_batch=m) for s, m in [(4, 4), (4, 2), (12, 6)]])
    assert taken[0] == taken[1]


def test_an_epoch_can_begin_where_it_was_left() -> None:
    rows = loader().epoch(0, used=6)
    assert take(rows, step=7, micro_batch=3) == loader().order.epoch(0)[6:13].tolist()


def test_every_sample_goes_to_one_rank() -> None:
    ranks = [loader(20, rank, 4).epoch(0) for rank in range(4)]
    everyone = [i for rows in ranks for i in take(rows, step=20, micro_batch=2)]
    assert sorted(everyone) == list(range(20))


@pytest.mark.parametrize("samples", [24, 23])
@pytest.mark.parametrize("others", [[1], [2], [4, 1, 2], [1, 4]])
def test_other_ranks_go_on_with_the_same_samples(samples: int, others: list[int]) -> None:
    dataset: Any = list(range(samples))
    order = SampleOrder(samples, 2, shuffle=True)
    steps, expected = [], order.epoch(3).tolist()
    for number, ranks in enumerate([2, *others, 2, 1]):
        loaders = [
            Loader(dataset, collate, order, rank, ranks, ByRows("none")) for rank in range(ranks)
        ]
        parts = [
            take(loader.epoch(3, used=4 * number), step=4, micro_batch=3) for loader in loaders
        ]
        assert {len(part) for part in parts} == {4 // ranks}
        steps.append(sorted(chain.from_iterable(parts)))
    assert steps == [sorted(expected[at : at + 4]) for at in range(0, 4 * len(steps), 4)]
    assert order.per_epoch == 24, "also where a sample is repeated for the ranks that it began with"


def test_bringing_samples_draws_nothing_from_the_runs_generator() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    take(loader().epoch(0), step=20, micro_batch=3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("ranks", range(1, 10))
def test_ranks_that_do_not_divide_a_step_have_as_many_micro_batches(ranks: int) -> None:
    micro_batches = ByRows("none")
    for samples in range(ranks, 71):
        step = [*range(100, 100 + samples)]
        for size in (1, 2, 3, 4, 7, 8, 16, 70):
            of_ranks = [micro_batches.portions(step, size, rank, ranks) for rank in range(ranks)]
            assert len({*map(len, of_ranks)}) == 1
            portions = [portion for of_rank in of_ranks for portion in of_rank]
            assert max(len(portion.sample_ids) for portion in portions) <= size
            counted = [id for each in portions if not each.weightless for id in each.sample_ids]
            assert sorted(counted) == step
            assert all(len(each.sample_ids) == 1 for each in portions if each.weightless)
            assert sum(each.weightless for each in portions) < ranks
            shares = [sum(len(p.sample_ids) for p in of if not p.weightless) for of in of_ranks]
            assert max(shares) - min(shares) <= 1
            assert micro_batches.of_all_ranks(step, size, ranks) == [
                each.sample_ids for each in portions if not each.weightless
            ]


def test_the_samples_after_an_uneven_step_are_dealt_out_from_the_first_rank_on() -> None:
    """The steps have the samples of the order, whichever ranks they are on, also after growth."""
    order = SampleOrder(60, 2, shuffle=True)
    for ranks in (1, 2, 3, 4, 7):
        of_ranks = [
            Loader(range(60), collate, order, rank, ranks, ByRows("none")).epoch(0, 4)  # type: ignore[arg-type]
            for rank in range(ranks)
        ]
        used = 4
        for samples, size in ((8, 2), (8, 2), (12, 3), (7, 1), (7, 4)):
            seen = []
            for rows in of_ranks:
                [*rows.step(samples, size)]
                seen += [id for each in rows.loaded for id in each.sample_ids]
                rows.advance(samples)
            assert sorted(seen) == sorted(order.epoch(0)[used : used + samples].tolist())
            used += samples
