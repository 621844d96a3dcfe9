"""``plan --trainer SFTTrainer`` plans tiny copies of popular models, or says why it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.popular_models import POPULAR, REFUSALS, WORDS, as_table, write_tiny
from tests.helpers.program_commands import plan, run

ROOT = Path(__file__).parents[2]
PARTS = 20
"""A few models each, as one takes some 15 seconds."""


@pytest.mark.exhaustive
@pytest.mark.runs
@pytest.mark.parametrize("part", range(PARTS))
def test_models_are_planned_or_refused(part: int, beside_trl: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    for model in POPULAR[part::PARTS]:
        folder = tmp_path / model.name
        write_tiny(folder, model)
        words = ("--hf", ".", "--trainer", "SFTTrainer", "max_length=32")
        if model.answer in REFUSALS:
            command = ("-m", "torchtune_adaptive", "plan", "--gpu", "h100", *words)
            done = run(beside_trl, folder, *command, XDG_CACHE_HOME=cache)
            assert done.returncode and REFUSALS[model.answer] in done.stderr, model.name
        words = (*words, *WORDS[model.answer])
        found = plan(beside_trl, folder, *words, XDG_CACHE_HOME=cache)
        assert found["verdict"] == "FITS", model.name


def test_the_page_has_all_models() -> None:
    assert len({one.name for one in POPULAR}) == len(POPULAR) >= 60
    assert as_table() in (ROOT / "docs" / "models.md").read_text()
