"""An environment of its own: what PEFT needs is not what torchtune needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OTHERS = ("transformers", "peft", "trl", "lightning", "pillow")


def make_environment(folder: Path) -> Path:
    """Install the library alone, as documented, beside the trainers of others; gives its Python."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=60)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*install, "torch"], check=True, timeout=600)
    subprocess.run([*install, "./library", *OTHERS, "pytest"], cwd=ROOT, check=True, timeout=600)
    return python
