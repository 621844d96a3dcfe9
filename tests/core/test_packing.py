"""Packing: nothing lost, nothing over budget, as many micro-batches everywhere, little padding."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from torchtune_adaptive.core.sizes.packing import COST_OF_A_MICRO_BATCH, Budget, pack

SHAPES: dict[str, Callable[[random.Random], int]] = {
    "log-normal": lambda r: min(2048, max(1, int(r.lognormvariate(5, 1)))),
    "uniform": lambda r: r.randint(1, 2048),
    "all the same": lambda r: 77,
    "two kinds": lambda r: r.choice([3, 2048]),
    "one token": lambda r: 1,
}


def budgets(numbers: random.Random, longest: int) -> Budget:
    """With rows that fall as lengths grow, as memory makes them."""
    rows, measured = numbers.randint(1, 8), []
    length = longest
    while length >= 1 and len(measured) < 4:
        measured.append((length, rows))
        length, rows = length // 2, int(rows * numbers.uniform(2, 3))
    return Budget(tuple(sorted(measured)))


@pytest.mark.parametrize("shape", SHAPES)
def test_thousands_of_steps(shape: str) -> None:
    numbers = random.Random(0)
    for _ in range(1000):
        ranks = numbers.choice([1, 2, 3, 4, 8])
        lengths = [SHAPES[shape](numbers) for _ in range(ranks * numbers.randint(1, 24))]
        budget = budgets(numbers, max(max(lengths), numbers.choice([64, 2048])))
        packed = pack(lengths, budget, ranks)
        assert len(packed) == ranks and len({len(parts) for parts in packed}) == 1
        rows = [row for parts in packed for part in parts for row in part]
        assert sorted(rows) == list(range(len(lengths))), "every row once"
        for part in (part for parts in packed for part in parts if part):
            assert len(part) <= budget.rows(max(lengths[row] for row in part))
        assert pack(lengths, budget, ranks) == packed, "the same each time"


def least_work(lengths: list[int], budget: Budget, each: float) -> float:
    """The least that micro-batches of sorted rows can compute, with padding and something for each, found
    by trying every cut."""
    rows = sorted(lengths)
    best = [0.0]
    for end in range(1, len(rows) + 1):
        starts = range(max(0, end - budget.rows(rows[end - 1])), end)
        best.append(min(best[start] + (end - start) * rows[end - 1] + each for start in starts))
    return best[-1]


@pytest.mark.parametrize("shape", ["log-normal", "uniform"])
def test_work_is_close_to_the_least_that_there_can_be(shape: str) -> None:
    numbers = random.Random(1)
    budget = Budget.of_tokens(4 * 2048, 2048)
    each = budget.tokens * COST_OF_A_MICRO_BATCH
    done = least = shares = 0.0
    for _ in range(10):
        lengths = [SHAPES[shape](numbers) for _ in range(96)]
        parts = [
            [lengths[row] for row in part] for rank in pack(lengths, budget, 2) for part in rank
        ]
        done += sum(len(part) * max(part) + each for part in parts)
        least += least_work(lengths, budget, each)
        padded = sum(len(part) * max(part) for part in parts)
        shares += (1 - sum(map(sum, parts)) / padded) / 10
    assert done <= 1.05 * least
    assert shares < 0.15


def test_ranks_get_the_same_work_in_each_round() -> None:
    numbers = random.Random(2)
    lengths = [SHAPES["log-normal"](numbers) for _ in range(256)]
    packed = pack(lengths, Budget.of_tokens(4096, 2048), 4)

    def work(part: list[int]) -> int:
        return len(part) * max(lengths[row] for row in part) if part else 0

    for parts in zip(*packed, strict=True):
        assert max(map(work, parts)) <= 4096
    for later, earlier in zip(packed[0][1:], packed[0], strict=False):
        assert work(later) <= work(earlier), (
            "the largest comes first, where memory is not yet cut up"
        )


def test_too_few_rows_leave_some_ranks_with_nothing() -> None:
    packed = pack([5, 9], Budget.of_tokens(100, 10), ranks=4)
    assert sorted(map(len, packed)) == [1, 1, 1, 1]
    assert sorted(row for parts in packed for part in parts for row in part) == [0, 1]


class TestBudget:
    def test_between_measurements_it_gives_no_more_than_both_allow(self) -> None:
        budget = Budget(((128, 40), (256, 16), (512, 6)))
        assert budget.rows(512) == 6 and budget.rows(256) == 16 and budget.rows(128) == 40
        assert budget.rows(400) == 6 * 512 // 400
        assert budget.rows(257) == 11 and budget.rows(200) == 20 and budget.rows(129) == 31
        assert budget.rows(64) == 80, "shorter than what was measured: as many tokens"
        assert budget.rows(513) == 0
        flat = Budget(((128, 10), (256, 10)))  # bounded by the rows of a step
        assert flat.rows(130) == 10

    def test_rows_never_grow_with_length(self) -> None:
        numbers = random.Random(3)
        for _ in range(200):
            budget = budgets(numbers, numbers.choice([64, 500, 2048]))
            rows = [budget.rows(length) for length in range(1, budget.longest + 1)]
            assert rows == sorted(rows, reverse=True) and rows[-1] >= 1

    def test_it_holds_where_memory_is_not_linear_in_length(self) -> None:
        """Dense masks: memory of rows x length x (1 + length / 500)."""

        def memory(rows: int, length: int) -> float:
            return rows * length * (1 + length / 500)

        limit = memory(4, 2048)
        measured = []
        for length in (2048, 1024, 512, 256):
            most = max(rows for rows in range(1, 2000) if memory(rows, length) <= limit)
            measured.append((length, most))
        budget = Budget(tuple(sorted(measured)))
        for length in range(1, 2049):
            assert memory(budget.rows(length), length) <= limit

    def test_it_shrinks_to_single_rows(self) -> None:
        budget = Budget(((128, 40), (512, 6)))
        assert budget.within(6 * 256).measured == ((128, 20), (512, 3))
        assert budget.within(6 * 8).measured == ((128, 1), (512, 1))

    def test_rows_of_each_rank_are_as_many_in_each_micro_batch(self) -> None:
        draw = random.Random(0)
        for _ in range(200):
            longest, rows = draw.randint(2, 60), draw.randint(1, 40)
            budget = Budget(((max(1, longest // 3), draw.randint(8, 12)), (longest, 3)))
            lengths = [[draw.randint(1, longest) for _ in range(rows)] for _ in range(3)]
            divided = [budget.micro_batches(lengths, rank) for rank in range(3)]
            counts = {tuple(map(len, parts)) for parts in divided}
            assert len(counts) == 1, "ranks launch the same"
            for of, parts in zip(lengths, divided, strict=True):
                assert sorted(row for part in parts for row in part) == [*range(rows)]
                for part in parts:
                    assert len(part) <= budget.rows(max(of[row] for row in part))
            # What is left when memory runs out after some micro-batches.
            done = draw.randint(0, len(divided[0]))
            before = [row for part in divided[1][:done] for row in part]
            for after in (budget, budget.within(draw.randint(1, budget.tokens))):
                rest = after.micro_batches(lengths, 1, len(before))
                assert sorted([*before, *(row for part in rest for row in part)]) == [*range(rows)]

    def test_what_is_left_is_divided_by_its_own_lengths(self) -> None:
        lengths = [[1, 10, 1, 1, 10, 1, 1, 1], [10, 1, 1, 1, 1, 1, 1, 10]]
        budget = Budget.of_tokens(20, 10)
        first, short = budget.micro_batches(lengths, 1)
        assert sorted(first) == [0, 7] and [*budget.micro_batches(lengths, 1, 2)] == [short]

    @pytest.mark.parametrize("wrong", [(), ((10, 0),), ((10, 2), (5, 3)), ((10, 2), (10, 3))])
    def test_nonsense_is_refused(self, wrong: tuple[tuple[int, int], ...]) -> None:
        with pytest.raises(ValueError, match="lengths, ascending"):
            Budget(wrong)

    def test_a_row_that_is_too_long_is_named(self) -> None:
        with pytest.raises(ValueError, match="a row of 11 tokens is longer"):
            pack([3, 11], Budget.of_tokens(20, 10), 1)
        with pytest.raises(ValueError, match="less than the longest row"):
            Budget.of_tokens(9, 10)
