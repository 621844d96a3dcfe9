"""What fits of many ways, from few trials."""

from __future__ import annotations

from math import log2

import pytest

from torchtune_adaptive.core.search.strategies import WaysThatFit

Way = tuple[int, int]
"""The number of something that is done over again, and whether another thing saves memory, too."""


def needs_as_much(one: Way, other: Way) -> bool:
    return one[0] <= other[0] and one[1] <= other[1]


@pytest.mark.parametrize("most", [1, 4, 32, 80])
def test_the_first_that_fits_of_each_line_is_found_in_few_trials(most: int) -> None:
    ranked = sorted((again, other) for again in range(most + 1) for other in (0, 1))
    for fewest in range(most + 2):
        known = WaysThatFit(needs_as_much, lambda way: way[1])
        tried = []
        for way in ranked:
            while known.fits(way) is None:
                tried.append(known.next(way, ranked))
                known.learn(tried[-1], tried[-1][0] + 3 * tried[-1][1] >= fewest)
        for again, other in ranked:
            assert known.fits((again, other)) is (again + 3 * other >= fewest)
        assert len(tried) == len(set(tried)) <= 2 * (log2(most + 1) + 2)


def test_what_is_in_no_order_is_tried_itself() -> None:
    known: WaysThatFit[str] = WaysThatFit(lambda one, other: one == other, lambda way: 0)
    known.learn("a", False)
    assert known.fits("b") is None and known.next("b", "abc") == "b"
    known.learn("b", True)
    assert (known.fits("a"), known.fits("b"), known.fits("c")) == (False, True, None)
