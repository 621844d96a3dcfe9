"""``ckpt-chaos`` kills a recipe while it saves: started again, it ends with the same weights, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import chaos

pytest.importorskip("ckpt_chaos")
pytestmark = pytest.mark.runs

CASES = {
    "gathered": {"max_points": 24},
    "sharded": {"max_points": 10, "ranks": 2},
    "in the background": {"max_points": 10, "ranks": 2},
    "sharded, the second rank": {"max_points": 6, "ranks": 2, "crash_rank": 1},
    "gathered, told to end": {"max_points": 8, "modes": "term", "grace": 20},
}


def killed(case: str, folder: Path, **more: Any) -> dict[str, str]:
    with chaos.served(folder, *chaos.OF_RECIPES) as jobs:
        way, options = case.partition(", ")[0], CASES[case]
        return chaos.recipe(jobs, folder / "work", way, **{**options, **more})


def test_a_killed_recipe_goes_on(tmp_path: Path) -> None:
    """Where a file is left half written, the first and another."""
    verdicts = killed("gathered", tmp_path, max_points=2, modes="torn")
    assert len(verdicts) == 3 and {*verdicts.values()} == {"PASS"}, verdicts


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_wherever_it_is_killed_a_recipe_goes_on(case: str, tmp_path: Path) -> None:
    verdicts = killed(case, tmp_path)
    # Told to end, a run leaves out saves whose points the tool would have named next.
    assert {*verdicts.values()} <= {"PASS", "NOT_REACHED"}, verdicts
    reached = [name for name, verdict in verdicts.items() if verdict == "PASS"]
    assert len(reached) > len(verdicts) / 2, verdicts
