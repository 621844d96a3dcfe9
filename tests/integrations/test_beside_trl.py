"""The tests against the real libraries, in environments that have them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.beside import ROOT
from tests.integrations.conftest import OF_AXOLOTL, OF_OTHERS, OF_TORCHTITAN, OF_TRITON

pytestmark = [pytest.mark.exhaustive, pytest.mark.runs]


@pytest.mark.parametrize("name", sorted(OF_OTHERS))
def test_with_the_real_libraries(name: str, beside_trl: Path, shard: int) -> None:
    in_environment(beside_trl, name, shard)


@pytest.mark.parametrize("name", sorted(OF_TORCHTITAN))
def test_with_the_real_torchtitan(name: str, beside_torchtitan: Path, shard: int) -> None:
    in_environment(beside_torchtitan, name, shard)


@pytest.mark.parametrize("name", sorted(OF_AXOLOTL))
def test_with_the_real_axolotl(name: str, beside_axolotl: Path, shard: int) -> None:
    in_environment(beside_axolotl, name, shard)


@pytest.mark.parametrize("name", sorted(OF_TRITON))
def test_with_triton(name: str, beside_triton: Path, shard: int) -> None:
    in_environment(beside_triton, name, shard)


def in_environment(python: Path, name: str, shard: int) -> None:
    path = f"tests/integrations/real/{name}"
    options = [
        "--exhaustive",
        "--shard",
        f"{shard}",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
        "--quiet",
    ]
    done = subprocess.run(
        [python, "-m", "pytest", path, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-6000:]
