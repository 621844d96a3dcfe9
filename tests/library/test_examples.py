"""The examples run as documented, in processes of their own; they compare their losses themselves."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.ranks import watch_ranks

pytestmark = pytest.mark.runs

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDED = {"transformers_loop": "transformers", "fabric": "lightning_fabric"}
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "common")
OUT_OF_MEMORY = r"out of memory in \w+ on rank 0"


def run_example(name: str) -> None:
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_fsdp2_recovers_and_learns_the_same() -> None:
    """In ranks that have everything imported; the exhaustive tests start all examples as documented."""
    ranks = watch_ranks(run_example, 2, "fsdp2", until_exit_of=[0, 1], timeout=120, join=False)
    assert [rank.exit_code for rank in ranks] == [0, 0], ranks[0].said
    said = "".join(rank.said for rank in ranks)
    assert re.search(OUT_OF_MEMORY, said) and "with a failure: " in said


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_an_example_recovers_and_learns_the_same(name: str) -> None:
    if find_spec(NEEDED.get(name, "torch")) is None:
        pytest.skip(f"needs {NEEDED[name]}: pip install 'torchtune-adaptive[examples]'")
    arguments = ["--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments, f"{name}.py"],
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONPATH": f"{EXAMPLES.parent}", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(OUT_OF_MEMORY, done.stderr)
    assert "with a failure: " in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) < 60
    assert ast.get_docstring(ast.parse(text), clean=True).endswith(f"examples/{name}.py")  # type: ignore[union-attr]
