"""An environment of its own: what PEFT needs is not what torchtune needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
OTHERS = ("transformers", "peft", "trl", "lightning", "pillow")
TORCHTITAN = ("torchtitan==0.3.0", "triton", "torchao>=0.18")
"""torchtitan needs an older datasets than TRL; and it does not say that it needs the other two."""


def make_environment(folder: Path, others: Sequence[str] = OTHERS, *, pinned: bool = True) -> Path:
    """Install the library alone, as documented, beside the trainers of others; gives its Python.

    Args:
        folder: where to make the environment.
        others: the packages of the others.
        pinned: whether all packages have the versions of ``constraints.txt``; otherwise, only torch has.
    """
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=60)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-compile"]
    constraint = ["--constraint", ROOT / "constraints.txt"]
    subprocess.run([*install, *constraint, "torch"], check=True, timeout=600)
    rest = [*constraint * pinned, "./library", *others, "pytest"]
    subprocess.run([*install, *rest], cwd=ROOT, check=True, timeout=1200)
    return python
