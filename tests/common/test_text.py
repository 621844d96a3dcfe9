"""Tables and amounts of memory, as people read them."""

from __future__ import annotations

import pytest

from torchtune_adaptive.common.text import (
    bytes_of,
    counted,
    duration,
    human_bytes,
    listed,
    not_essential,
    table,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1 KiB"),
        (int(4.444 * MIB), "4.44 MiB"),
        (int(18.92 * GIB), "18.9 GiB"),
        (139.8 * GIB, "140 GiB"),
        (5000 * GIB, "5000 GiB"),
    ],
)
def test_bytes_have_three_significant_digits(number: int, text: str) -> None:
    assert human_bytes(number) == text


def test_a_part_of_an_amount_has_one_unit_if_both_have_the_same() -> None:
    assert bytes_of(19 * GIB, 74 * GIB) == "19 of 74 GiB"
    assert bytes_of(900 * MIB, 74 * GIB) == "900 MiB of 74 GiB"


def test_a_table_is_as_wide_as_its_cells() -> None:
    assert table(("a", "number"), [("long", "1"), ("b", "1000")], right={1}) == [
        "  a     number",
        "  long       1",
        "  b       1000",
    ]
    assert table(("a", "b"), [("1", "")]) == ["  a  b", "  1"]


def test_things_are_counted() -> None:
    assert [counted(n, "step") for n in (0, 1, 1234)] == ["0 steps", "1 step", "1,234 steps"]
    assert [counted(n, "retry", "retries") for n in (1, 2)] == ["1 retry", "2 retries"]


def test_things_are_listed_where_they_are_few() -> None:
    few = [["0"], ["0", "1"], ["0", "1", "3"], list("123456789")]
    expected = ["rank 0", "ranks 0 and 1", "ranks 0, 1 and 3", "9 ranks"]
    assert [listed("rank", names) for names in few] == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.9, "59.9 s"),
        (60, "1 min 0 s"),
        (3599.6, "1 h 0 min"),
        (7500, "2 h 5 min"),
    ],
)
def test_durations_have_two_parts(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("error", [OSError("no space"), RuntimeError("no font")])
def test_what_only_people_read_ends_no_run(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with not_essential("curves.png"):
        raise error
    (line,) = caplog.messages
    assert line == (
        f"curves.png was not written ({type(error).__name__}: {error}). The run continues."
    )


def test_who_asks_to_stop_is_heard_while_such_a_file_is_written() -> None:
    with pytest.raises(KeyboardInterrupt), not_essential("curves.png"):
        raise KeyboardInterrupt
