"""Which cases of a rotating test each tier runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import leave_to_other_shards


class Case:
    """What pytest knows of a case of a test, as far as it matters here."""

    def __init__(self, number: int, mark: pytest.MarkDecorator) -> None:
        self.nodeid = f"tests/test_file.py::test_name[{number}]"
        self.marks = {"rotating": mark.mark}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, name: str) -> None:
        self.marks[name] = getattr(pytest.mark, name).mark


@pytest.mark.parametrize(("cases", "at_once"), [(1, 1), (3, 1), (5, 2), (7, 2)])
def test_successive_shards_run_all_cases(cases: int, at_once: int) -> None:
    mark = pytest.mark.rotating(at_once) if at_once > 1 else pytest.mark.rotating
    visited: set[str] = set()
    for shard in range(10, 10 - (-cases // at_once)):
        items: list[Any] = [Case(number, mark) for number in range(cases)]
        assert leave_to_other_shards(items, shard, exhaustive=True) == []
        run = {item.nodeid for item in items if "exhaustive" not in item.marks}
        assert len(run) == at_once
        visited |= run
    assert len(visited) == cases


def test_so_do_successive_shards_of_the_exhaustive_tier_where_a_test_says_so() -> None:
    mark = pytest.mark.rotating(exhaustive=2)
    for exhaustive in (True, False):
        visited: set[str] = set()
        for shard in (7, 8, 9):
            items: list[Any] = [Case(number, mark) for number in range(5)]
            items[0].add_marker("exhaustive")
            left_out = leave_to_other_shards(items, shard, exhaustive)
            assert len(left_out) == (3 if exhaustive else 0)
            assert sum("exhaustive" not in item.marks for item in items) == 1
            visited |= {item.nodeid for item in items if item not in left_out}
        assert len(visited) == 5
