"""The wheel brings everything: what a user installs is what is tested here, away from this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.recipe.test_launched_runs import QUICK, launch, losses
from torchtune_adaptive import __version__
from torchtune_adaptive.recipe.registry import our_configs

pytestmark = pytest.mark.runs

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        timeout=120,
        stdout=subprocess.DEVNULL,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked where it comes before the checkout on the path."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_what_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in our_configs():
        assert f"torchtune_adaptive/configs/{name}.yaml" in names
    for recipe in (ROOT / "recipes").glob("*.py"):
        assert recipe.name in names, "recipes are top-level modules: `tune run NAME` runs `-m NAME`"
    assert "torchtune_adaptive/py.typed" in names, "or type checkers ignore our annotations"
    top = {name.split("/")[0] for name in names}
    # torchtune's own wheel has a package `recipes` that raises when it is imported.
    assert not top & {"recipes", "configs", "tests", "benchmarks", "docs"}


def test_its_dependencies_are_those_that_work(wheel: Path) -> None:
    (name,) = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("/METADATA")]
    metadata = zipfile.ZipFile(wheel).read(name).decode()
    assert f"\nVersion: {__version__}\n" in metadata
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["dependencies"]):
        assert f"Requires-Dist: {requirement}" in metadata


@pytest.mark.exhaustive
def test_it_runs_under_the_stock_command_line(site: Path, tmp_path: Path, exhaustive: bool) -> None:
    where = subprocess.run(
        [sys.executable, "-c", "import torchtune_adaptive as t; print(t.__file__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    ).stdout
    assert where.startswith(str(site))
    flags = ["--nproc_per_node", "2"] if exhaustive else []
    launch(
        *("tune", "run", *flags, "adaptive_lora_finetune_distributed"),
        *("--config", "tiny/lora", "output_dir=out", *QUICK),
        cwd=tmp_path,
        PYTHONPATH=str(site),
    )
    assert len(losses(tmp_path / "out")) == 2
