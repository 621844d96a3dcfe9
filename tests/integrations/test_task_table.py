"""docs/results/tasks.md is made of what its cells said, and the README counts them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
MADE = runpy.run_path(str(ROOT / "docs" / "make" / "task_table.py"))


def test_the_page_is_made_of_what_its_cells_said() -> None:
    made = "run: python docs/make/task_table.py"
    assert MADE["PAGE"].read_text() == MADE["page"](MADE["kept"]()), made


def test_the_readme_says_how_many_there_are() -> None:
    kept = MADE["kept"]()
    count = len(kept["tasks"]) + len(kept["losses"])
    assert f"[{count} tasks and losses](docs/results/tasks.md)" in (ROOT / "README.md").read_text()


def test_cells_differ_by_rounding_at_most_and_what_is_not_divided_says_why() -> None:
    kept = MADE["kept"]()
    for row in (kept["tasks"] | kept["losses"]).values():
        assert all(re.fullmatch(r"equal|[1-9]e-[5-9]", row[way]) for way in MADE["WAYS"]), row
        assert bool(row["why"]) == (row["divided"] == "no"), row
