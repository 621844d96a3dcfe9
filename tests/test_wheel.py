"""The wheels of the library and of the recipes: what a user installs, away from this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import torchtune_adaptive
from tests.helpers.beside import ROOT, link_environment, needed_by_recipes
from tests.helpers.hugging_face import PUBLISHED, written
from tests.helpers.launched import QUICK, launch, losses
from torchtune_adaptive import __version__
from torchtune_adaptive.recipe.registry import our_configs

pytestmark = pytest.mark.runs


LIBRARY, RECIPES = ROOT / "library", ROOT
NEEDED = ("torch", "numpy", "psutil", "pyyaml")
"""What the library needs, and says that it needs."""


def build(project: Path, folder: Path, *options: str) -> Path:
    """The wheel of a project: by way of its source distribution, or, with ``--wheel``, without."""
    command = [sys.executable, "-m", "build", *options, "--no-isolation", "--outdir", folder]
    subprocess.run([*command, project], check=True, timeout=300, stdout=subprocess.DEVNULL)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(LIBRARY, tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(RECIPES, tmp_path_factory.mktemp("recipes"))


@pytest.fixture(scope="module")
def site(library: Path, recipes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels, unpacked where they come before the checkout on the path."""
    folder = tmp_path_factory.mktemp("site")
    for wheel in (library, recipes):
        zipfile.ZipFile(wheel).extractall(folder)
    return folder


def files(wheel: Path) -> set[str]:
    """What a wheel installs, apart from what it says about itself."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def about(wheel: Path, name: str) -> str:
    archive = zipfile.ZipFile(wheel)
    (path,) = [each for each in archive.namelist() if each.endswith(f".dist-info/{name}")]
    return archive.read(path).decode()


def test_every_file_is_in_one_of_the_wheels(library: Path, recipes: Path) -> None:
    package = ROOT / "torchtune_adaptive"
    ours = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    of_recipes = {path for path in ours if path.is_relative_to(package / "recipe")}
    installed = {path.relative_to(ROOT).as_posix(): path for path in {*ours} - of_recipes}
    assert files(library) == installed.keys()
    expected = {path.relative_to(ROOT).as_posix() for path in of_recipes}
    # Recipes are top-level modules: `tune run NAME` runs `-m NAME`. torchtune's own wheel has a package
    # `recipes` that raises when it is imported.
    expected |= {path.name for path in (ROOT / "recipes").glob("*.py")}
    expected |= {f"torchtune_adaptive/configs/{name}.yaml" for name in our_configs()}
    assert files(recipes) == expected
    for name, path in installed.items():
        assert zipfile.ZipFile(library).read(name) == path.read_bytes()


@pytest.mark.parametrize("name", ["library", "recipes"])
def test_a_wheel_is_the_same_without_a_source_distribution(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    direct = build({"library": LIBRARY, "recipes": RECIPES}[name], tmp_path, "--wheel")
    one, other = map(zipfile.ZipFile, (request.getfixturevalue(name), direct))
    assert {name: one.read(name) for name in one.namelist()} == {
        name: other.read(name) for name in other.namelist()
    }


def test_their_dependencies_are_those_that_work(library: Path, recipes: Path) -> None:
    of_library, of_recipes = (about(wheel, "METADATA") for wheel in (library, recipes))
    for metadata in (of_library, of_recipes):
        assert f"\nVersion: {__version__}\n" in metadata
    assert f"\nRequires-Dist: torchtune-adaptive-library=={__version__}\n" in of_recipes
    project = tomllib.loads((LIBRARY / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["dependencies"]):
        assert requirement.name in NEEDED and f"\nRequires-Dist: {requirement}\n" in of_library
    for requirement in needed_by_recipes():
        assert f"\nRequires-Dist: {requirement}\n" in of_recipes
    assert "tune-adaptive" in about(library, "entry_points.txt")
    for wheel in (library, recipes):
        assert about(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()


class Environment:
    """An environment with what the library needs and no torchtune, and what is installed in it.

    Args:
        folder: where to make it.
        others: distributions that it has besides.
    """

    def __init__(self, folder: Path, *others: str) -> None:
        self.python = link_environment(folder, *NEEDED, *others)
        self.folder = folder

    def pip(self, *words: str | Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.python, *words]
        subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)

    def install(self, wheel: Path) -> None:
        self.pip("install", "--no-deps", "--no-index", "--no-compile", wheel)

    def run(self, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """A command of the environment, with nothing of the one that runs the tests."""
        return subprocess.run(
            [self.folder / "bin" / words[0], *words[1:]],
            cwd=self.folder,
            env={"HOME": str(self.folder), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def said(self, *words: str, status: int = 0) -> str:
        """What a command prints, which must end with a status: on stdout, or as an error."""
        done = self.run(*words)
        assert done.returncode == status, (done.stdout, done.stderr)
        return done.stderr if status else done.stdout


def assert_the_library_works(there: Environment) -> None:
    names = ", ".join(torchtune_adaptive.__all__)
    there.said("python", "-c", f"from torchtune_adaptive import {names}")
    assert there.said("tune-adaptive", "--version") == f"tune-adaptive {__version__}\n"
    assert "need torchtune and the recipes" in " ".join(
        there.said("tune-adaptive", "--help").split()
    )
    assert "SFTTrainer" in there.said("tune-adaptive", "plan", "--trainer", "SFTTrainer", "--help")
    assert "traces" in there.said("tune-adaptive", "cache", "show")
    assert "h100-80gb" in there.said("tune-adaptive", "plan", "--list-gpus")


def assert_it_says_what_is_missing(there: Environment) -> None:
    run = ("run", "adaptive_full_finetune_distributed", "--config", "tiny/full")
    for words in (run, ("find", *run[1:]), ("ls",), ("cp", "--help"), ("validate", "tiny/full")):
        said = there.said("tune-adaptive", *words, status=1)
        assert f"{words[0]} needs torchtune and the recipes, which are not installed" in said
        assert said.count("\n") == 1 and said.endswith(": pip install ./library .\n")
    said = there.said("tune-adaptive", "plan", "tiny/full", status=2)
    assert "plan without --hf MODEL needs torchtune and the recipes" in said
    written(there.folder, PUBLISHED["Qwen3-0.6B"])
    said = there.said("tune-adaptive", "plan", "--hf", ".", status=2)
    assert "transformers is not installed" in said and "pip install transformers" in said


@pytest.mark.rotating
@pytest.mark.parametrize("first", ["library", "recipes"])
def test_they_come_and_go_in_any_order(
    first: str, library: Path, recipes: Path, tmp_path: Path
) -> None:
    there = Environment(tmp_path / "there")
    for wheel in (library, recipes) if first == "library" else (recipes, library):
        there.install(wheel)
    configs = "import torchtune_adaptive as t; print(*t.__path__, sep='/configs\\n')"
    folder, stable = map(Path, there.said("python", "-c", configs).splitlines())
    assert (folder / "tiny" / "full.yaml").is_file() and (stable / "launch.py").is_file()
    before = {path for path in folder.parents[1].rglob("*") if path.suffix in (".py", ".yaml")}

    there.pip("uninstall", "--yes", "torchtune-adaptive")
    assert not stable.exists() and not list(folder.parents[1].glob("adaptive_*"))
    assert_the_library_works(there)
    assert_it_says_what_is_missing(there)

    there.install(recipes)
    there.pip("uninstall", "--yes", "torchtune-adaptive-library")
    assert (folder / "tiny" / "full.yaml").is_file() and (stable / "launch.py").is_file()
    assert not (there.folder / "bin" / "tune-adaptive").exists()

    there.install(library)
    assert_the_library_works(there)
    after = {path for path in folder.parents[1].rglob("*") if path.suffix in (".py", ".yaml")}
    assert after == before


@pytest.mark.exhaustive
def test_the_library_says_what_a_trainer_needs(library: Path, tmp_path: Path) -> None:
    there = Environment(tmp_path / "there", "transformers")
    there.install(library)
    folder = there.folder / "model"
    folder.mkdir()
    written(folder, PUBLISHED["Qwen3-0.6B"])
    words = ("plan", "--hf", "model", "--method", "lora", "--json")
    done = there.run("tune-adaptive", *words, "--gpu", "4090", timeout=300)
    assert done.returncode == 2 and "pip install accelerate" in done.stderr


@pytest.mark.exhaustive
def test_it_runs_under_the_stock_command_line(site: Path, tmp_path: Path, exhaustive: bool) -> None:
    where = subprocess.run(
        [sys.executable, "-c", "import torchtune_adaptive as t; print(t.__file__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        check=True,
        timeout=300,
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


BESIDE_PEFT = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from torchtune_adaptive import AdaptiveStep, find_batch_size
from torchtune_adaptive.integrations.transformers import adaptive
from trl import SFTTrainer
adaptive(SFTTrainer)

size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
config = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, **size)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

def forward(tokens):
    loss = model(input_ids=tokens, labels=tokens, num_items_in_batch=1).loss
    return loss, tokens[:, 1:].numel()

step = AdaptiveStep(model, optimizer, forward, memory_limit="16MiB")
size = find_batch_size(step, lambda rows: torch.zeros(rows, 32, dtype=torch.long), ceiling=16)
outcome = step(list(torch.randint(64, (32, 32))), torch.stack, size)
print("found", int(size), "loss", outcome.loss)
"""


@pytest.mark.exhaustive
def test_the_library_beside_peft_and_trl(beside_trl: Path, tmp_path: Path) -> None:
    """As documented, in an environment of its own: what PEFT needs is not what torchtune needs."""
    subprocess.run([beside_trl, "-m", "pip", "check"], check=True, timeout=300)
    done = subprocess.run(
        [beside_trl, "-c", BESIDE_PEFT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "found" in done.stdout, done.stderr[-3000:]
