"""Which tests and cases each tier runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import leave_to_other_shards, other_parts


class Case:
    """What pytest knows of a case of a test, as far as it matters here."""

    def __init__(self, number: int, *marks: pytest.MarkDecorator, test: str = "test_name") -> None:
        self.nodeid = f"tests/test_file.py::{test}[{number}]"
        self.marks = {mark.name: mark.mark for mark in marks}

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
        leave_to_other_shards(items, shard)
        run = {item.nodeid for item in items if "exhaustive" not in item.marks}
        assert len(run) == at_once
        visited |= run
    assert len(visited) == cases


def test_two_shards_run_all_tests_and_more_run_all_cases() -> None:
    visited: set[str] = set()
    for shard in range(10, 16):
        items: list[Any] = [
            *(Case(0, pytest.mark.alternating, test=f"test_{letter}") for letter in "abc"),
            *(Case(number, pytest.mark.alternating, pytest.mark.rotating) for number in range(3)),
            Case(0, test="test_always"),
        ]
        leave_to_other_shards(items, shard)
        run = {item.nodeid for item in items if "exhaustive" not in item.marks}
        assert len(run) == 3, "two of the four that alternate, and the one that does not"
        assert items[-1].nodeid in run
        visited |= run
        if shard == 11:
            assert len(visited) == 5, "all tests; of the rotating one there are two more cases"
    assert visited == {item.nodeid for item in items}


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_successive_shards_run_all_parts(parts: int) -> None:
    items: list[Any] = [Case(number, pytest.mark.rotating) for number in range(7)]
    for item in items[1:]:
        item.add_marker("exhaustive")
    visited: list[str] = []
    for shard in range(10, 10 + parts):
        left_out = other_parts(items, shard, parts)
        assert items[0] not in left_out, "the quick tier runs it in any case"
        visited += [item.nodeid for item in items[1:] if item not in left_out]
    assert sorted(visited) == [item.nodeid for item in items[1:]]


def test_of_a_sweep_a_part_runs_little_and_all_shards_run_all() -> None:
    items: list[Any] = [Case(number, pytest.mark.sweep) for number in range(190)]
    for item in items:
        item.add_marker("exhaustive")
    assert other_parts(items, 5, 1) == []
    run = [set(items) - set(other_parts(items, shard, 3)) for shard in range(90)]
    assert max(map(len, run)) == 3
    assert set.union(*run) == set(items)
