"""A permutation that takes no memory: each row once, in an order that looks random."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from math import sqrt

import numpy as np
import pytest

from torchtune_adaptive.core.rows.permutation import Permutation

SIZES = [
    *range(1, 34),
    *(1 << power for power in range(6, 17)),
    *((1 << power) - 1 for power in range(6, 17)),
    *((1 << power) + 1 for power in range(6, 17)),
    100_003,
]


@pytest.mark.parametrize("size", SIZES)
def test_every_number_comes_once(size: int) -> None:
    for key in ((0, 0), (0, 1), (7, 0)):
        found = Permutation(size, *key)(np.arange(size))
        assert np.array_equal(np.sort(found), np.arange(size))


@pytest.mark.parametrize("size", [5, 1000, 65_537])
def test_a_place_is_the_same_number_whatever_is_asked_with_it(size: int) -> None:
    whole = Permutation(size, 3, 4)(np.arange(size))
    again = Permutation(size, 3, 4)
    some = np.random.default_rng(0).integers(0, size, 50)
    assert np.array_equal(again(some), whole[some])
    assert [int(again([place])[0]) for place in some] == whole[some].tolist()


def test_it_is_the_same_on_every_machine_and_with_every_version() -> None:
    """A run would resume with other samples, if it changed."""
    assert Permutation(10, 0, 0)(np.arange(10)).tolist() == TEN
    assert Permutation(10**9, 42, 3)(np.arange(4) * 10**8).tolist() == BILLION


TEN = [9, 3, 8, 1, 0, 2, 5, 7, 6, 4]
BILLION = [121622702, 867804413, 693825101, 808295412]


@pytest.mark.parametrize("size", [1000, 100_003])
def test_seeds_and_epochs_have_orders_of_their_own(size: int) -> None:
    orders = [
        Permutation(size, seed, epoch)(np.arange(size)) for seed in range(3) for epoch in range(3)
    ]
    for number, one in enumerate(orders):
        assert not np.array_equal(one, np.arange(size))
        for other in orders[:number]:
            equal = int((one == other).sum())
            assert equal < 12, "of two random orders, one place has the same number on average"
            assert abs(np.corrcoef(one, other)[0, 1]) < 4 / sqrt(size)


@pytest.mark.parametrize("size", [999, 4096, 100_003])
def test_places_say_nothing_of_numbers(size: int) -> None:
    for epoch in range(5):
        found = Permutation(size, 1, epoch)(np.arange(size))
        assert abs(np.corrcoef(np.arange(size), found)[0, 1]) < 4 / sqrt(size)
        assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 4 / sqrt(size)


def test_steps_have_numbers_from_everywhere() -> None:
    """How many numbers of each tenth are in a step: as often as by chance."""
    size, step, parts = 100_000, 250, 10
    found = Permutation(size, 5, 0)(np.arange(size)) * parts // size
    counts = np.stack([np.bincount(one, minlength=parts) for one in found.reshape(-1, step)])
    expected = step / parts
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    freedom = (parts - 1) * (len(counts) - 1)
    assert abs(chi_squared - freedom) < 4 * sqrt(2 * freedom)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_orders_of_a_few_rows_are_equally_frequent(size: int) -> None:
    orders = [*permutations(range(size))]
    each = 120
    seen = Counter(
        tuple(Permutation(size, 0, epoch)(np.arange(size)).tolist())
        for epoch in range(each * len(orders))
    )
    chi_squared = sum((seen[order] - each) ** 2 / each for order in orders)
    freedom = len(orders) - 1
    assert chi_squared < freedom + 4 * sqrt(2 * freedom), seen


@pytest.mark.parametrize("size", [0, -3, 1 << 62])
def test_a_size_that_cannot_be(size: int) -> None:
    with pytest.raises(ValueError, match=f"size: {size} is not between"):
        Permutation(size, 0)
