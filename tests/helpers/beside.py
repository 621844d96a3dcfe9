"""Environments of their own: what PEFT needs is not what torchtune needs."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OTHERS = ("transformers", "peft", "trl", "bitsandbytes", "requests", "lightning", "pillow")
TOOLS = ("pytest", "ckpt-chaos")
"""What tests there need besides."""
TORCHTITAN = ("torchtitan==0.3.0", "triton", "torchao>=0.18")
"""torchtitan needs an older datasets than TRL; and it does not say that it needs the other two."""
AXOLOTL = (
    *(
        "transformers==5.16.1",
        "accelerate==1.13.0",
        "trl==1.9.0",
        "peft==0.20.0",
        "datasets==4.8.4",
    ),
    *(
        "addict",
        "art",
        "colorama",
        "einops",
        "evaluate",
        "fire",
        "numba",
        "posthog",
        "pydantic==2.12.5",
    ),
    *(
        "python-dotenv",
        "schedulefree",
        "scipy",
        "tensorboard",
        "typer==0.25.1",
        "wandb",
        "zstandard",
    ),
)
"""What Axolotl needs, and can be used without a GPU; see ``WITHOUT_DEPENDENCIES``."""
WITHOUT_DEPENDENCIES = (
    *("axolotl==0.19.0", "axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6"),
    *("bitsandbytes==0.50.2", "fastcore", "platformdirs", "triton==3.7.1"),
    *("kernels==0.16.2", "kernels-data", "tomlkit", "liger-kernel==0.8.1"),
    *("mistral-common==1.11.5", "pydantic-extra-types", "pycountry", "tiktoken", "jsonschema"),
    *("jsonschema-specifications", "referencing", "rpds-py", "attrs"),
)
"""Axolotl, and what it imports and does not use there."""
LLAMA_FACTORY = (
    *(
        "transformers==5.6.0",
        "accelerate==1.11.0",
        "trl==0.24.0",
        "peft==0.18.1",
        "datasets==4.0.0",
    ),
    *("av", "bitsandbytes==0.50.2", "einops", "fire", "hf-transfer", "matplotlib", "omegaconf"),
    *("pandas", "pydantic", "scipy", "sentencepiece", "tiktoken", "tyro<0.9"),
)
"""What LLaMA-Factory needs to train, but for torchaudio, of which none is for the torch here."""
LIGER = ("liger-kernel==0.8.5", "triton==3.7.1")
"""Liger, whose kernels are not launched."""
TRITON = (".", "triton==3.7.1")
"""The recipes, and the Triton that the torch of ``constraints.txt`` requires where it is built for CUDA."""


def needed_by_recipes() -> list[Requirement]:
    """What pyproject.toml says that the recipes need, besides the library."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    written = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["dependencies"]
    return [*map(Requirement, written)]


def make_environment(
    folder: Path,
    others: Sequence[str] = OTHERS,
    *,
    without_dependencies: Sequence[str] = (),
    pinned: bool = True,
) -> Path:
    """Install the library, as documented, beside packages of others; gives its Python.

    Args:
        folder: where to make the environment.
        others: the packages of the others; the recipes, which are not installed otherwise, are ``.``.
        without_dependencies: packages that are installed without what they need.
        pinned: whether all packages have the versions of ``constraints.txt``; otherwise, only torch has.
    """
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=300)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-compile"]
    constraint = ["--constraint", ROOT / "constraints.txt"]
    subprocess.run([*install, *constraint, "torch"], check=True, timeout=600)
    rest = [*constraint * pinned, "./library", *others, *TOOLS]
    subprocess.run([*install, *rest], cwd=ROOT, check=True, timeout=1200)
    if without_dependencies:
        alone = [*install, "--no-deps", *without_dependencies]
        subprocess.run(alone, cwd=ROOT, check=True, timeout=600)
    return python


def link_environment(folder: Path, *names: str) -> Path:
    """Make an environment that has links to distributions of this one, and to what these need, and nothing
    else; gives its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=300)
    site = Path(sysconfig.get_path("purelib", vars={"base": folder}))
    for name, found in _needed(names).items():
        assert found.files, name
        for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            if not (site / top).exists():  # some have a folder in common
                (site / top).symlink_to(Path(str(found.locate_file(top))))
    return folder / "bin" / "python"


def _needed(names: Sequence[str]) -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    left = [*names]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = distribution(name)
            for each in map(Requirement, found[name].requires or ()):
                if each.marker is None or each.marker.evaluate({"extra": ""}):
                    left.append(each.name)
    return found
