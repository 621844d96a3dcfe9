"""What ``TransformersStep`` plans is what the trainers themselves take, on the simulated device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.real_trainers import CASES

pytestmark = [pytest.mark.exhaustive, pytest.mark.runs]

ROOT = Path(__file__).parents[2]


def test_what_is_planned_is_what_the_trainers_take(beside_trl: Path, tmp_path: Path) -> None:
    script = shutil.copy(ROOT / "tests" / "helpers" / "real_trainers.py", tmp_path)
    done = subprocess.run(
        [beside_trl, script],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results.keys() == CASES.keys()
    for name, (planned, measured) in results.items():
        assert planned == pytest.approx(measured, rel=0.001), name
