"""What ``TransformersRollouts`` plans is what TRL's trainers themselves take, on the simulated device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.exhaustive, pytest.mark.runs]

HELPERS = Path(__file__).parents[1] / "helpers"
WITHIN = {"training": 0.001, "scoring": 0.001, "generation": 0.002}


def test_what_is_planned_is_what_the_trainers_take(beside_trl: Path, tmp_path: Path) -> None:
    for name in ("real_trainers.py", "real_rollouts.py"):
        shutil.copy(HELPERS / name, tmp_path)
    done = subprocess.run(
        [beside_trl, "real_rollouts.py"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 7
    for case, (planned, measured) in results.items():
        assert planned.keys() == measured.keys(), case
        for phase, within in WITHIN.items():
            if phase in planned:
                assert planned[phase] == pytest.approx(measured[phase], rel=within), (case, phase)
    scored = {case for case, (planned, _) in results.items() if "scoring" in planned}
    assert scored == {*filter(lambda case: "reference" in case or "twice" in case, results), "RLOO"}
