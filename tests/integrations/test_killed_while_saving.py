"""docs/results/killed_while_saving.md is made of what ckpt-chaos found, and the README has its counts."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
MADE = runpy.run_path(str(ROOT / "benchmarks" / "killed_while_saving.py"))
KNOWN = json.loads(MADE["PAGE"].with_suffix(".json").read_text())


def test_the_page_is_made_of_what_was_found() -> None:
    assert MADE["PAGE"].read_text() == MADE["page"](KNOWN["found"], KNOWN["versions"])


def test_all_of_ours_pass_and_the_readme_says_how_many() -> None:
    readme = (ROOT / "README.md").read_text()
    for case, row in {
        "Trainer": "transformers' Trainer",
        "`adaptive(Trainer)`": "**`adaptive(Trainer)`**",
        "recipe": "**recipes** (a sample)",
    }.items():
        counts = KNOWN["found"][case]
        assert f"| {row} | {sum(counts.values())} | {counts['PASS']} |" in readme
    for case, counts in KNOWN["found"].items():
        assert case.startswith(("Trainer", "SFTTrainer")) or {*counts} == {"PASS"}, case
