"""The tests of ``core`` run where torchtune is not installed, nor anything else that the recipes need."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.beside import ROOT, link_environment
from tests.helpers.tiers import place

# Tests that ranks run, of each kind of helper: the others take longer than they tell here.
ON_RANKS = "each_launch or test_phases or test_noise_on_ranks"


@pytest.mark.ranks
def test_the_core_needs_only_torch_to_be_tested(
    tmp_path: Path, exhaustive: bool, shard: int
) -> None:
    """All tests, or one of each module, which imports what it needs."""
    needed = ("torch", "numpy", "psutil", "pyyaml", "pytest")
    python = link_environment(tmp_path / "environment", *needed)
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}

    def printed(*arguments: str) -> str:
        run = subprocess.run(
            [python, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
        return run.stdout

    printed(
        "-c",
        "import importlib.util as u; assert not any(map(u.find_spec, ('torchtune', 'omegaconf')))",
    )
    pytest_of_core = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--shard", f"{shard}")
    listed = [
        name
        for chosen in (["not ranks"], ["ranks", "-k", ON_RANKS])
        for name in printed(
            *pytest_of_core, "--collect-only", "tests/core", "-m", *chosen
        ).splitlines()
        if "::" in name
    ]
    of_module: dict[str, list[str]] = {}
    for name in listed:
        of_module.setdefault(name.partition("::")[0], []).append(name)
    assert len(of_module) > 20
    one_of_each = [min(names, key=lambda n: place(f"{shard} {n}")) for names in of_module.values()]
    said = printed(*pytest_of_core, *(listed if exhaustive else one_of_each))
    assert " passed" in said
