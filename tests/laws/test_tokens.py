"""What token budgets cost as ranks grow: operations of the packing, packings of a step, bytes exchanged."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from tests.helpers.ranks import run_ranks
from torchtune_adaptive.core.ranks import agreement
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.rows import micro_batches
from torchtune_adaptive.core.rows.loader import Loader, SampleOrder
from torchtune_adaptive.core.rows.micro_batches import ByTokens
from torchtune_adaptive.core.sizes import packing
from torchtune_adaptive.core.sizes.packing import Budget, pack
from torchtune_adaptive.core.sizes.split import Split
from torchtune_adaptive.library.division import by_tokens
from torchtune_adaptive.recipe.search import budget_report


def lengths_of(count: int, numbers: random.Random, longest: int = 2048) -> list[int]:
    return [min(longest, max(1, int(numbers.lognormvariate(5, 1)))) for _ in range(count)]


def packed_by_scanning(lengths: list[int], budget: Budget, ranks: int) -> list[list[list[int]]]:
    """The micro-batches of a step as they are defined: each split looks at all micro-batches."""

    def work(part: list[int]) -> int:
        return len(part) * lengths[part[-1]]

    parts = packing._cut(lengths, budget)
    while len(parts) % ranks and any(len(part) > 1 for part in parts):
        largest = max((part for part in parts if len(part) > 1), key=work)
        parts.append(largest[len(largest) // 2 :])
        del largest[len(largest) // 2 :]
    parts.sort(key=lambda part: (-work(part), part[0]))
    parts += [[] for _ in range(-len(parts) % ranks)]
    return [parts[rank::ranks] for rank in range(ranks)]


def test_a_heap_splits_the_micro_batches_that_a_scan_would() -> None:
    numbers = random.Random(0)
    for case in range(400):
        ranks = numbers.randint(1, 40)
        count = numbers.randint(1, 6 * ranks)
        lengths = lengths_of(count, numbers)
        if case % 2:  # many of the same length
            lengths = [numbers.choice([3, 50, 900]) for _ in range(count)]
        budget = Budget.of_tokens(numbers.choice([2048, 8192, 40_000]), 2048)
        assert pack(lengths, budget, ranks) == packed_by_scanning(lengths, budget, ranks)


@pytest.mark.parametrize("ranks", [64, 1024, 4096])
@pytest.mark.parametrize("rows", [4, 16])
def test_each_split_costs_a_few_operations_of_a_heap(
    ranks: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations, splits = 0, []

    def push(heap: list[Any], item: Any) -> None:
        nonlocal operations
        operations += 1
        heapq.heappush(heap, item)

    def pop(heap: list[Any]) -> Any:
        nonlocal operations
        operations += 1
        return heapq.heappop(heap)

    split = packing._split_largest

    def splitting(parts: list[list[int]], work: Any, times: int) -> None:
        calls = 0

        def counted(part: list[int]) -> int:
            nonlocal calls
            calls += 1
            return work(part)  # type: ignore[no-any-return]

        before = len(parts)
        split(parts, counted, times)
        splits.append((times, len(parts) - before, calls, before))

    monkeypatch.setattr(packing, "heappush", push)
    monkeypatch.setattr(packing, "heappop", pop)
    monkeypatch.setattr(packing, "_split_largest", splitting)
    lengths = lengths_of(ranks * rows, random.Random(ranks), 4096)
    pack(lengths, Budget.of_tokens(32_768, 4096), ranks)
    [(times, done, works, before)] = splits
    assert done == times > 0, "there is something to split"
    assert operations <= 3 * times
    assert works <= before + 2 * times


class Rows(Dataset[Any]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Function that says how often rows were packed since it was called before."""
    seen: list[Any] = []

    def noting(*arguments: Any) -> Any:
        seen.append(arguments)
        return pack(*arguments)

    def since_last_time() -> int:
        count = len(seen)
        seen.clear()
        return count

    monkeypatch.setattr(micro_batches, "pack", noting)
    return since_last_time


def of_tokens(lengths: list[int]) -> ByTokens:
    of_rows = np.array(lengths, dtype=np.int32)
    return ByTokens(Budget.of_tokens(4096, 2048), of_rows, padding_id=0, ignored=-100)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rows_of_a_step_are_packed_once(workers: int, packs: Callable[[], int]) -> None:
    divided = of_tokens(lengths_of(90, random.Random(0)))

    def collate(rows: list[int]) -> dict[str, Any]:
        tokens = torch.zeros(len(rows), max(divided.row_lengths[row] for row in rows))
        return {"tokens": tokens, "labels": tokens, "rows": rows}

    order = SampleOrder(90, 2, shuffle=True)
    for size in (divided.budget.tokens, divided.budget.tokens // 2):
        epoch = Loader(Rows(), collate, order, 1, 2, divided, workers).epoch(0)
        brought: list[list[int]] = []
        for _ in range(4):
            brought += [batch["rows"] for batch in epoch.step(20, size)]
            epoch.advance(20)
        assert packs() == 4, "as many as there are steps, even if workers fetch ahead"
        steps = [order.epoch(0)[used : used + 20].tolist() for used in range(0, 80, 20)]
        portions = [each for step in steps for each in divided.portions(step, size, 1, 2)]
        assert brought == [portion.sample_ids for portion in portions]
        assert packs() == 4
        assert not [*epoch.step(20, size)], "ten rows are no step"
        assert packs() == 0


def test_padding_is_counted_from_few_steps_that_are_packed_once_each(
    packs: Callable[[], int],
) -> None:
    for ranks, rows, steps in ((2, 40, 5), (64, 64 * 4 * 30, 20), (8, 31, 0)):
        split = Split(micro_batch=4, accumulation=1, ranks=ranks)
        lengths = lengths_of(rows, random.Random(ranks))
        without, with_budget = budget_report.padding_shares(of_tokens(lengths), split)
        assert packs() == steps
        assert (0 < with_budget < without < 1) if steps else (without == with_budget == 0)


def lengths_of_ranks(one_collective: int) -> list[Any]:
    """The micro-batches of this rank, and the bytes in which the ranks have told each other the lengths."""
    agreement._ONE_COLLECTIVE = one_collective
    ranks, sent = Ranks(timeout=200), 0
    numbers = random.Random(ranks.rank)
    lengths = [numbers.randint(1, 100) for _ in range(30)]

    def counting(make: Any) -> Any:
        def exchange(tensor: torch.Tensor, *positional: Any, **named: Any) -> Any:
            nonlocal sent
            sent += tensor.numel() * tensor.element_size()
            return make(tensor, *positional, **named)

        return exchange

    for name in ("all_reduce", "gather", "broadcast"):
        setattr(dist, name, counting(getattr(dist, name)))
    divided = by_tokens(lengths, ranks)(3, 200)
    everyones = ranks.gather(lengths)
    longest = max(map(max, everyones))
    budget = Budget(tuple((length, 1) for length in sorted({200, max(200, longest)})))
    same = divided == budget.micro_batches(everyones, ranks.rank, 3)
    ranks.close()
    return [same, sent, len(divided)]


@pytest.mark.ranks
@pytest.mark.parametrize(("one_collective", "exchanges"), [(7, 1), (1, 2)])
def test_ranks_exchange_eight_bytes_a_row_whatever_their_number(
    one_collective: int, exchanges: int
) -> None:
    """And divide their rows as if each knew those of all."""
    for ranks in (2, 3):
        said = run_ranks(lengths_of_ranks, ranks, one_collective)
        assert [same for same, _, _ in said] == [True] * ranks
        assert {sent for _, sent, _ in said} == {30 * 8 * exchanges}
        assert len({parts for _, _, parts in said}) == 1
