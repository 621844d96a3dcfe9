"""Plans of real trainers take what they took with the versions that the numbers are of."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.trainer_cases import CASES

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
PEAKS = json.loads((ROOT / "tests" / "data" / "trainer_peaks.json").read_text())
PARTS = 20
"""A few cases each, as a case takes half a minute."""
NAMES = [*PEAKS]


def allocated(python: Path, folder: Path, names: list[str]) -> dict[str, int]:
    for name in ("real_programs.py", "trainer_cases.py"):
        shutil.copy(HELPERS / name, folder)
    done = subprocess.run(
        [python, "real_programs.py", *names],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.exhaustive
@pytest.mark.runs
@pytest.mark.parametrize("part", range(PARTS))
def test_trainers_take_what_they_took(part: int, beside_trl: Path, tmp_path: Path) -> None:
    names = NAMES[part::PARTS]
    for name, found in allocated(beside_trl, tmp_path, names).items():
        assert found == pytest.approx(PEAKS[name]["run"], rel=0.001), name


def test_the_page_has_these_numbers() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make" / "trainer_peaks.py"))["page"]
    assert page() == (ROOT / "docs" / "results" / "trainers.md").read_text()
    assert PEAKS.keys() <= CASES.keys()


SPLIT = """
from transformers import LlamaForCausalLM

LlamaForCausalLM.from_pretrained("model", tp_plan="auto")
"""


@pytest.mark.exhaustive
@pytest.mark.runs
def test_a_model_that_is_split_over_ranks_is_refused(beside_trl: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPLIT)
    command = [beside_trl, "-m", "torchtune_adaptive", "plan", "train.py", "--nproc", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode and "tp_plan: a model that from_pretrained splits" in done.stderr
