"""docs/results/trainer_table.md is made of what its cells said, and has all of them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

MADE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make" / "trainer_table.py"))


def test_the_page_is_made_of_what_its_cells_said() -> None:
    assert MADE["PAGE"].read_text() == MADE["page"](MADE["kept"]()), (
        "run: python docs/make/trainer_table.py"
    )


def test_each_cell_has_been_run_and_no_other() -> None:
    assert [tuple(row["cell"]) for row in MADE["kept"]()["cells"]] == [*MADE["cells"]()]


def test_the_packages_are_named() -> None:
    named = MADE["kept"]()["versions"]
    assert [*named] == [*MADE["PACKAGES"]] and all(named.values())


def test_what_differs_by_more_than_rounding_is_not_hidden() -> None:
    """A cell says one of a few words, and one that is no number says why."""
    for row in MADE["kept"]()["cells"]:
        if row["outcome"] in ("refused", "fails", "the plain trainer fails"):
            assert row["why"], row
        else:
            assert re.fullmatch(r"equal|differs|\d+e-\d", row["outcome"]) and not row["why"], row
