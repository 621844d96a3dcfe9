"""The examples run as documented, in processes of their own; they compare their losses themselves.

Those of trainers run beside TRL, in ``tests/integrations/real/test_trainer_examples.py``.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.runs

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDED = {
    "grpo": "transformers",
    "transformers_loop": "transformers",
    "fabric": "lightning_fabric",
    "accelerate_loop": "accelerate",
}
RANKS = {"tensor_parallel": "4"}
SHARED = {"common", "tiny"}
"""What the examples share."""
NAMES = sorted({path.stem for path in EXAMPLES.glob("*.py")} - SHARED)
LOOPS = [name for name in NAMES if not name.startswith("trl_")]
OUT_OF_MEMORY = r"out of memory in \w+ on rank 0"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LOOPS)
def test_an_example_recovers_and_learns_the_same(name: str) -> None:
    if find_spec(NEEDED.get(name, "torch")) is None:
        pytest.skip(f"needs {NEEDED[name]}: pip install 'torchtune-adaptive[examples]'")
    arguments = ["--standalone", "--nproc_per_node", RANKS.get(name, "2")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments, f"{name}.py"],
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONPATH": f"{EXAMPLES.parent}", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(OUT_OF_MEMORY, done.stderr)
    assert "with a failure: " in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) < (80 if name == "grpo" else 65)
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert (
        docstring.endswith(f"examples/{name}.py") or f"\npython examples/{name}.py\n" in docstring
    )
