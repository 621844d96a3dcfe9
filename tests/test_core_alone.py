"""The tests of ``core`` run where torchtune is not installed, nor anything else that the recipes need."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.beside import ROOT, link_environment

# Tests that ranks run, of each kind of helper: the others take longer than they tell here.
ON_RANKS = "each_launch or test_phases or test_noise_on_ranks"


@pytest.mark.ranks
def test_the_core_needs_only_torch_to_be_tested(tmp_path: Path, shard: int) -> None:
    needed = ("torch", "numpy", "psutil", "pyyaml", "pytest")
    python = link_environment(tmp_path / "environment", *needed)
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    missing = (
        "import importlib.util as u; assert not any(map(u.find_spec, ('torchtune', 'omegaconf')))"
    )
    subprocess.run([python, "-c", missing], env=environment, check=True, timeout=60)
    tests = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--shard",
        str(shard),
        "tests/core",
    ]
    for chosen in (["-m", "not ranks"], ["-m", "ranks", "-k", ON_RANKS]):
        run = subprocess.run(
            [*tests, *chosen],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
        assert " passed" in run.stdout
