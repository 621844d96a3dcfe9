"""Loaders whose batches have the rows of whole micro-batches."""

from __future__ import annotations

import pickle
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, get_worker_info

from torchtune_adaptive.integrations.rows import Keeping, KeptRows, RowsOfStep
from torchtune_adaptive.integrations.step_batches import StepBatches, counted_in, divide


def padded(rows: list[int]) -> dict[str, torch.Tensor]:
    """Rows as long as their number; and where they were collated."""
    longest, worker = max(rows), get_worker_info()
    tokens = torch.tensor([[row] * row + [0] * (longest - row) for row in rows])
    return {"tokens": tokens, "where": torch.tensor([-1 if worker is None else worker.id])}


class Rows(Dataset[int]):
    def __init__(self, number: int, loads_none: bool = True) -> None:
        self.number, self.loads_none = number, loads_none

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, number: int) -> int:
        return number + 1

    def __getitems__(self, numbers: list[int]) -> list[int]:
        if not numbers and not self.loads_none:
            raise IndexError("nothing")
        return [number + 1 for number in numbers]


def loader_of(rows: int = 32, batch: int = 4, **more: Any) -> tuple[Any, Keeping]:
    keeping = Keeping(padded)
    return DataLoader(Rows(rows), batch_size=batch, collate_fn=keeping, **more), keeping


def sampled(batches: StepBatches) -> list[list[list[int]]]:
    """The batches of each step of 4."""
    every = iter(batches)
    return [step for _ in range(len(batches)) if (step := list(islice(every, 4)))]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("rows", [48, 40, 43])
def test_a_step_has_its_rows_in_their_order_and_as_many_batches(size: int, rows: int) -> None:
    plain = BatchSampler(SequentialSampler(range(rows)), 4, drop_last=False)
    keeping = Keeping(padded)
    keeping.size = size
    steps = sampled(StepBatches(plain, keeping, 4, 4, 2))
    before = list(plain)
    assert [len(step) for step in steps] == [
        len(before[at : at + 4]) for at in range(0, 12, 4) if before[at:]
    ]
    for at, step in enumerate(steps):
        of_step = [*chain(*before[4 * at : 4 * at + 4])]
        assert [*chain(*step)] == of_step
        made = [made for batch in step for made in keeping([row + 1 for row in batch]).made]
        expected = [of_step[start : start + size] for start in range(0, len(of_step), size)]
        if len(of_step) % 4 == 0:  # an odd end stays as it is
            assert [number for number, _ in made] == [len(part) for part in expected]


@pytest.mark.parametrize(("size", "workers"), [(16, 2), (16, 3), (16, 4), (8, 2), (8, 4), (8, 3)])
def test_processes_take_turns(size: int, workers: int) -> None:
    plain = BatchSampler(SequentialSampler(range(16 * 12)), 4, drop_last=False)
    keeping = Keeping(padded)
    keeping.size = size
    busy = [0] * workers
    for number, batch in enumerate(StepBatches(plain, keeping, 4, 4, workers)):
        busy[number % workers] += bool(batch)
    assert max(busy) - min(busy) <= 1, busy


@pytest.mark.parametrize("persistent", [False, True])
def test_processes_that_load_make_what_they_are_told(persistent: bool) -> None:
    loader, keeping = loader_of(num_workers=2, persistent_workers=persistent, prefetch_factor=1)
    assert divide(loader, 4, 4, larger=True) and len(loader) == 8
    assert loader.prefetch_factor == 6, "three micro-batches of a step for two processes"
    for size in (0, 8, 2, 16):
        keeping.size = size
        for batches in zip(*[iter(loader)] * 4, strict=True):
            rows = RowsOfStep(batches)
            parts = [range(at, at + (size or 4)) for at in range(0, 16, size or 4)]
            made = rows.made()
            assert [*made] == [tuple(part) for part in parts]
            for part in parts:
                inputs, again = made[tuple(part)], padded([rows[at] for at in part])
                assert torch.equal(inputs["tokens"], again["tokens"])
                assert inputs["where"] >= 0, "collated where the loader loads"


def test_a_size_that_changes_begins_with_a_step() -> None:
    loader, keeping = loader_of()
    assert divide(loader, 4, 4, larger=False)
    batches = iter(loader)
    first = next(batches)
    keeping.size = 16
    step = [first, *islice(batches, 3)]
    assert [len(batch) for batch in step] == [4] * 4
    assert [len(batch) for batch in batches] == [16, 0, 0, 0]


def test_what_is_not_divided() -> None:
    loader, _ = loader_of()
    assert not divide(loader, 8, 2, larger=False), "its batches are not those of the settings"
    assert not divide(DataLoader(Rows(8), batch_size=4), 4, 2, larger=False), "nobody keeps rows"
    whole = DataLoader(Rows(8, loads_none=False), batch_size=4, collate_fn=Keeping(padded))
    assert not divide(whole, 4, 2, larger=False), "a batch without rows cannot be loaded"
    own = BatchSampler(SequentialSampler(range(8)), 4, drop_last=False)
    own.__class__ = type("Own", (BatchSampler,), {})
    chosen = DataLoader(Rows(8), batch_sampler=own, collate_fn=Keeping(padded))
    assert not divide(chosen, 4, 2, larger=False), "batches may have any rows"
    assert not divide([], 4, 2, larger=False)
    any_order, _ = loader_of(num_workers=2, in_order=False)
    assert not divide(any_order, 4, 2, larger=False), "those of a step may come apart"


def test_tokens_are_counted_once() -> None:
    keeping = Keeping(lambda rows: {"tokens": torch.ones(len(rows), 3), "name": "x"})
    keeping.size = 2
    some, none = keeping([1, 2, 3]), keeping([])
    like = some.made[0][1]
    assert counted_in(some, like)["tokens"].numel() == 9
    assert counted_in(none, like)["tokens"].numel() == 0
    assert counted_in(KeptRows([1], [(1, like)]), like) is like


def test_rows_travel_packed_and_by_their_values() -> None:
    whole = torch.arange(1 << 16)
    rows = [
        {"a": whole[3:5], "b": [1], "c": whole[:4].bfloat16()[1:3], "d": torch.tensor(2)},
        {"a": torch.empty(0), "b": "text"},
    ]
    sent = pickle.dumps(KeptRows(rows, [(2, None)]))
    assert len(sent) < 4096, "a view does not bring what it is a view of"
    batch = pickle.loads(pickle.dumps(pickle.loads(sent)))  # not unpacked on the way
    assert len(batch) == 2 and batch.made == [(2, None)]
    first, second = batch.rows
    assert first["a"].tolist() == [3, 4] and first["c"].tolist() == [1, 2] and first["d"] == 2
    assert first["c"].dtype == torch.bfloat16 and second["a"].numel() == 0
    first["a"][0] = 7
    assert whole[3] == 3 and batch.rows is batch.rows


def test_what_is_pinned_is_what_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *device: self + 1)
    batch = KeptRows([torch.zeros(1)], [(1, {"x": [torch.zeros(2)]})]).pin_memory()
    assert batch.inputs["x"][0].tolist() == [1, 1] and batch.rows[0].tolist() == [0]
