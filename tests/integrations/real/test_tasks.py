"""The table of tasks says what its cells say when they are run again."""

from __future__ import annotations

import runpy
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.real.each_task import WAYS, outcome
from tests.integrations.real.sentences import LOSSES
from tests.integrations.real.tasks import TASKS

pytestmark = [pytest.mark.exhaustive, pytest.mark.runs]
MADE = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "make" / "task_table.py"))
KEPT: dict[str, Any] = MADE["kept"]()
FEW = 3
"""Tasks that a shard runs again, others with each."""


def test_it_has_all_that_is_run() -> None:
    assert ([*KEPT["tasks"]], [*KEPT["losses"]]) == ([*TASKS], [*LOSSES])
    assert MADE["WAYS"] == (*WAYS,)


@pytest.mark.parametrize("number", range(FEW))
@pytest.mark.parametrize("part", ["tasks", "losses"])
def test_some_cells(part: str, number: int, shard: int) -> None:
    name, kept = [*KEPT[part].items()][(shard * FEW + number) % len(KEPT[part])]
    if part == "losses":
        pytest.importorskip("sentence_transformers")
    elif name in ("segmentation by object", "object detection"):  # which match what is there
        pytest.importorskip("scipy")
    if any(_installed(each) != KEPT["versions"][each] for each in ("transformers", "accelerate")):
        kept = kept | {"why": None}
    found = outcome(name)
    for way in WAYS:  # what is rounded differs from CPU to CPU
        assert found[way] == kept[way] or {found[way], kept[way]} <= ROUNDED, (name, found)
    assert found["divided"] == kept["divided"], (name, found)
    assert kept["why"] in (None, found["why"]), (name, found)


ROUNDED = {"equal", *(f"{digit}e-6" for digit in range(1, 10))}


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
