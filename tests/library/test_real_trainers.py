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


OF_LIGER = [name for name, case in CASES.items() if case.get("use_liger_kernel")]
OF_OTHERS = [name for name in CASES if name not in OF_LIGER]
PARTS, PARTS_OF_LIGER = 8, 3
"""All at once take a quarter of an hour, and no test of CI should."""


@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_planned_is_what_the_trainers_take(
    part: int, beside_trl: Path, tmp_path: Path
) -> None:
    compare(beside_trl, OF_OTHERS[part::PARTS], tmp_path)


@pytest.mark.parametrize("part", range(PARTS_OF_LIGER))
def test_what_is_planned_with_liger_is_what_its_functions_take(
    part: int, beside_liger: Path, tmp_path: Path
) -> None:
    """Its kernels, which need a GPU, are not launched; all memory is allocated around them."""
    compare(beside_liger, OF_LIGER[part::PARTS_OF_LIGER], tmp_path)


def compare(python: Path, names: list[str], tmp_path: Path) -> None:
    for name in ("fsdp2_on_cpu.py", "real_quantized.py", "real_trainers.py"):
        script = shutil.copy(ROOT / "tests" / "helpers" / name, tmp_path)
    done = subprocess.run(
        [python, script, *names],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results.keys() == {*names}
    for name, (planned, measured) in results.items():
        assert planned == pytest.approx(measured, rel=0.001), name
