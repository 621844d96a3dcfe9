"""The tests against the real libraries, in an environment that has them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.beside import ROOT

pytestmark = [pytest.mark.exhaustive, pytest.mark.runs]

FILES = sorted(path.name for path in Path(__file__).parent.glob("real/test_*.py"))


@pytest.mark.parametrize("name", FILES)
def test_with_the_real_libraries(name: str, beside_trl: Path) -> None:
    path = f"tests/integrations/real/{name}"
    options = ["--exhaustive", "-W", "ignore", "-p", "no:cacheprovider", "--quiet"]
    done = subprocess.run(
        [beside_trl, "-m", "pytest", path, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-6000:]
