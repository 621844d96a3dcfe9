"""The example files of other trainers end as the page says."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.helpers.beside import ROOT

EVERY = 12
DATA = ROOT / "tests" / "data"
OF_LLAMA_FACTORY = json.loads((DATA / "example_files_llama_factory.json").read_text())
OF_TRL = json.loads((DATA / "example_scripts_trl.json").read_text())


@pytest.mark.exhaustive
@pytest.mark.runs
@pytest.mark.parametrize("first", range(EVERY))
def test_files_of_llama_factory(first: int, tmp_path: Path, beside_llama_factory: Path) -> None:
    python = beside_llama_factory
    source = ("--no-deps", "--no-binary", ":all:", "llamafactory==0.9.5")
    subprocess.run(
        [python, "-m", "pip", "download", *source], cwd=tmp_path, check=True, timeout=300
    )
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    words = (next(tmp_path.glob("*/examples")), tmp_path / "found", str(EVERY), str(first))
    subprocess.run(
        [python, "-m", "tests.helpers.llama_factory_files", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        check=True,
        timeout=1500,
    )
    found = dict(map(json.loads, (tmp_path / "found").read_text().splitlines()))
    assert found
    for name, outcome in found.items():
        if "pip install" not in outcome:  # a package that is not there
            assert (outcome == "planned") == (OF_LLAMA_FACTORY[name] == "planned"), outcome


@pytest.mark.parametrize(("of", "outcomes"), [("LLaMA-Factory", OF_LLAMA_FACTORY), ("TRL", OF_TRL)])
def test_the_page_has_these_numbers(of: str, outcomes: dict[str, str]) -> None:
    page = (ROOT / "docs" / "results" / "example-files.md").read_text()
    section = page.partition(f"## {of}")[2].partition("\n## ")[0]
    planned = sum(outcome == "planned" for outcome in outcomes.values())
    assert f"| planned | {planned} |" in section and f"| all | {len(outcomes)} |" in section
