"""Rows of numbers as text."""

from __future__ import annotations

import pytest

from torchtune_adaptive.common import packed_rows, unpacked_rows

LARGEST = (1 << 63) - 1


@pytest.mark.parametrize("rows", [[], [(1, -1, 0)], [(LARGEST, 0, -LARGEST)] * 3])
def test_rows_are_the_same_again(rows: list[tuple[int, int, int]]) -> None:
    assert [*unpacked_rows(packed_rows(rows), 3)] == rows


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        ("", "incomplete"),
        ("nonsense", "incorrect header"),
        ("eJw=", "incomplete"),
        ("an error", "base64"),
        (packed_rows([(1, 2)]), "shorter"),
    ],
)
def test_text_that_has_no_such_rows_is_refused(damaged: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        [*unpacked_rows(damaged, 3)]


def test_repeated_rows_are_small() -> None:
    assert len(packed_rows([(1 << 40, -1, 7)] * 10_000)) < 5_000
