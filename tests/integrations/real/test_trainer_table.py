"""The table of trainers says what its cells say when they are run again."""

from __future__ import annotations

import runpy
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.real.beside_plain import SETTINGS, outcome

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
MADE = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "make" / "trainer_table.py"))
VERSIONS = MADE["kept"]()["versions"]


def test_its_settings_are_those_that_are_run() -> None:
    assert [*MADE["SETTINGS"]] == [*SETTINGS]


@pytest.mark.skipif(
    any(version(name) != VERSIONS[name] for name in ("transformers", "trl", "accelerate", "peft")),
    reason="the table is of other versions",
)
@pytest.mark.parametrize("trainer", MADE["TRAINERS"])
def test_a_cell_of_each_trainer(trainer: str, shard: int) -> None:
    """With each shard another cell."""
    rows = [row for row in MADE["kept"]()["cells"] if row["cell"][0] == trainer]
    if not find_spec("bitsandbytes"):
        rows = [row for row in rows if "QLoRA" not in row["cell"]]
    row = rows[shard % len(rows)]
    word, why = outcome(*row["cell"])
    if row["outcome"].endswith("e-6"):  # what is rounded differs from CPU to CPU
        assert word == "equal" or word.endswith("e-6"), (word, why)
    else:
        assert (word, why) == (row["outcome"], row["why"]), row
