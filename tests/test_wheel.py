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

from tests.helpers.beside import ROOT
from tests.recipe.test_launched_runs import QUICK, launch, losses
from tests.test_layers import OWN_WHEEL
from torchtune_adaptive import __version__
from torchtune_adaptive.recipe.registry import our_configs

pytestmark = pytest.mark.runs


def build(project: Path, folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, project],
        check=True,
        timeout=120,
        stdout=subprocess.DEVNULL,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


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


def test_the_library_alone_is_the_same_modules(wheel: Path, tmp_path: Path) -> None:
    library = zipfile.ZipFile(build(ROOT / "library", tmp_path))
    everything = zipfile.ZipFile(wheel)
    ours = [name for name in everything.namelist() if name.startswith("torchtune_adaptive/")]
    parts = tuple(f"torchtune_adaptive/{part}/" for part in ("common", *OWN_WHEEL))
    modules = {name for name in ours if name.startswith(parts) or name.count("/") == 1}
    modules.remove("torchtune_adaptive/__main__.py")
    for name in modules:
        assert library.read(name) == everything.read(name)
    others = {name for name in library.namelist() if ".dist-info/" not in name} - modules
    assert others == {"torchtune_adaptive/LICENSE"}


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
    subprocess.run([beside_trl, "-m", "pip", "check"], check=True, timeout=60)
    done = subprocess.run(
        [beside_trl, "-c", BESIDE_PEFT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "found" in done.stdout, done.stderr[-3000:]
