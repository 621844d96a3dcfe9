"""Every command in the README, the docs and the heads of the configs works.

The quick tier reads each one as its program would: recipe and config exist, the overrides pass the checks of
a run, the arguments are known. The exhaustive tier runs those that need neither a GPU nor a download.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from torchtune._recipe_registry import get_all_recipes

from tests.helpers import programs
from tests.helpers.hugging_face import PUBLISHED, written
from tests.helpers.launched import QUICK
from tests.helpers.runs import BIN
from tests.helpers.torchvision import use_torchvision
from torchtune_adaptive.cli import plan_options
from torchtune_adaptive.recipe.registry import RECIPES, load_config
from torchtune_adaptive.recipe.settings.checks import check
from torchtune_adaptive.recipe.settings.kind_table import kind_of

pytestmark = pytest.mark.runs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
CONFIGS = sorted(ROOT.glob("configs/*/*.yaml"))
PROGRAMS = ("tune", "tune-adaptive", "make", "python", "srun")

# Stand-ins for what the reader fills in.
FILLED_IN = {
    "my_config.yaml": "tiny/lora",
    "my_grpo.yaml": "tiny/grpo",
    "CONFIG": "tiny/full",
    "$SLURM_NNODES": "2",
    "DIR": "Qwen3-0.6B",
    "HOST": "localhost",
    "JOB": "job",
    "MODEL": "Qwen3-0.6B",
    "ORG/NAME": "Qwen/Qwen3-0.6B",
    "~/models/Qwen3-0.6B": "Qwen3-0.6B",
}

NOT_HERE = {"trl", "axolotl.yaml", "llama3_lora_sft.yaml", "sft.yaml", "grpo.yaml"}
"""Other trainers, which are not installed here, and their files."""


def commands_of(page: Path) -> set[str]:
    """The commands in code blocks, and those in the text that have arguments."""
    text = page.read_text()
    if page.suffix == ".yaml":  # the comment at its head
        text = text.partition("\n\n")[0].replace("#  ", "   ")
    blocks = re.sub(r" *\\\n\s*", " ", text)  # continued lines
    found = re.findall(rf"^ {{4}}((?:{'|'.join(PROGRAMS)}) .*)$", blocks, re.MULTILINE)
    for fenced in re.findall(
        r"^```(?:bash|sh|shell)?\n(.*?)^```", blocks, re.MULTILINE | re.DOTALL
    ):
        found += re.findall(rf"^((?:{'|'.join(PROGRAMS)}) .*)$", fenced, re.MULTILINE)
    found += re.findall(r"`((?:tune|tune-adaptive) [\w-]+ [^`]*--[^`]*)`", text)
    found += re.findall(r"`(make [\w-]+)`", text)
    return {" ".join(each.split("  #")[0].split()) for each in found}


COMMANDS = sorted({command for page in PAGES for command in commands_of(page)})
IN_CONFIGS = sorted({command for config in CONFIGS for command in commands_of(config)})


def words_of(command: str) -> list[str]:
    words = shlex.split(command)
    if words[0] == "srun":
        words = words[1:]
    return [FILLED_IN.get(word, word) for word in words]


def config_of(words: list[str]) -> DictConfig:
    """The config that a ``run`` or ``find`` would have."""
    at = words.index("--config")
    overrides = OmegaConf.from_dotlist(words[at + 2 :])
    merged = OmegaConf.merge(load_config(words[at + 1]), overrides)
    assert isinstance(merged, DictConfig)
    return merged


def test_the_docs_have_commands() -> None:
    assert len(COMMANDS) >= 15
    assert any(command.startswith("srun tune run --nnodes") for command in COMMANDS)


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("configs/tiny/*.yaml")), ids=lambda page: page.stem
)
def test_the_head_of_a_tiny_config_is_true(page: Path) -> None:
    head = page.read_text().partition("\n\n")[0]
    commands = commands_of(page)
    assert commands and all(f"--config tiny/{page.stem}" in command for command in commands)
    for command in commands:
        has_device = config_of(words_of(command)).adaptive_batching.memory_limit is not None
        assert has_device is ("use_maximum_batch_size=False" not in command)
    assert ("all the memory of this machine" in head) is (len(commands) == 2)


@pytest.mark.parametrize("command", [*COMMANDS, *IN_CONFIGS])
def test_a_documented_command_is_understood(command: str) -> None:
    if "vision" in command:
        use_torchvision()
    words = words_of(command)
    match words[:2]:
        case ["make", *_]:
            done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True)
            assert done.returncode == 0, done.stderr
        case ["tune" | "tune-adaptive", "run" | "find"] if "eleuther_eval" not in words:
            recipe = words[words.index("--config") - 1]
            assert recipe in RECIPES
            cfg = config_of(words)
            check(cfg, kind_of(cfg))
        case ["tune-adaptive", "plan"]:
            parser = argparse.ArgumentParser()
            plan_options.add_arguments(parser)
            arguments = plan_options.parsed(parser, words[2:])
            assert not arguments.unknown
            assert arguments.config is None or load_config(arguments.config)
        case ["tune", "download"]:
            assert words[2].count("/") == 1 and words[3] == "--output-dir"
        case ["tune-adaptive", "validate"]:
            load_config(words[2])
        case ["tune", "run"]:  # torchtune's own recipe, which needs a trained model
            configs = {config.name for recipe in get_all_recipes() for config in recipe.configs}
            assert words[words.index("--config") + 1] in configs
        case ["python", "-m"]:
            assert (ROOT / Path(*words[2].split("."))).with_suffix(".py").exists()
        case ["python", script]:
            text = (ROOT / script).read_text()
            assert all(f'"{word}"' in text for word in words if word.startswith("--"))
        case _:
            pytest.fail(f"{command!r}: say how it is tested")


def runs_here(command: str) -> bool:
    words = words_of(command)
    plans = words[:2] == ["tune-adaptive", "plan"] and NOT_HERE.isdisjoint(words)
    if "--hf" in words:
        plans = plans and Path(words[words.index("--hf") + 1]).name in PUBLISHED
    return plans or any(word.startswith("tiny/") for word in words)


def documented_machine() -> str:
    """The file that docs/planning.md shows for ``--machine``."""
    page = (ROOT / "docs" / "planning.md").read_text()
    (lines,) = re.findall(r"^`box\.yaml` has [^\n]*\n\n((?: {4}[^\n]*\n)+)", page, re.MULTILINE)
    return textwrap.dedent(lines)


@pytest.mark.exhaustive
@pytest.mark.rotating
@pytest.mark.parametrize("command", [command for command in COMMANDS if runs_here(command)])
def test_a_documented_command_runs(
    command: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    words = words_of(command)
    program, environment = [str(BIN / words[0])], dict(os.environ)
    if words[1] in ("run", "find"):
        words += [*QUICK, "output_dir=out"]
    if "train.py" in words:
        programs.written(tmp_path)
    if "--hf" in words:
        folder = tmp_path / words[words.index("--hf") + 1]
        folder.mkdir(parents=True)  # the name of a model, which is planned without a network
        written(folder, PUBLISHED[folder.name])
        program = [str(request.getfixturevalue("beside_trl")), "-m", "torchtune_adaptive"]
        environment["PYTHONPATH"] = str(ROOT)
    if "--machine" in words:
        (tmp_path / words[words.index("--machine") + 1]).write_text(documented_machine())
    # The largest plan takes half a minute on an idle machine. Beside other tests, on a slow one, 400 s were
    # not enough.
    done = subprocess.run(
        [*program, *words[1:]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    # A plan also ends with 1: the configured batch does not fit.
    assert done.returncode in ((0, 1) if words[1] == "plan" else (0,)), done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["demo", "demo-oom"])
def test_a_demo_runs(target: str, tmp_path: Path) -> None:
    """With the commands of the Makefile, but its output elsewhere."""
    printed = subprocess.run(
        ["make", "-n", "--no-print-directory", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    script = printed.stdout.replace("demo_output", str(tmp_path / "output"))
    done = subprocess.run(
        ["sh", "-euc", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
