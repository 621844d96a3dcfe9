"""The examples of trainers run as their docstrings say; with FSDP2, as they would on GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

pytestmark = [pytest.mark.exhaustive, pytest.mark.runs]

ROOT = Path(__file__).parents[3]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = ["accelerate.commands.launch", "--main_process_port", "0"]
ACCELERATE += ["--config_file", f"{ROOT}/examples/accelerate_fsdp2.yaml"]
WAYS = {
    "python": [],
    "torchrun": ["-m", *TORCHRUN],
    "accelerate": ["-m", *ACCELERATE, f"{Path(__file__).parent}/run_with_fsdp2.py"],
}
FOUND = (
    r"torchtune_adaptive: 32 rows a step.* = \d+ x micro-batch (\d+) \(\d+ rows: out of memory in "
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["trl_sft", "trl_grpo"])
def test_an_example_shows_and_logs_the_size_that_it_finds(
    name: str, way: str, tmp_path: Path
) -> None:
    if (name, way) == ("trl_grpo", "accelerate") and Version(version("accelerate")) < Version(
        "1.15"
    ):
        pytest.skip("refused with this version of accelerate: generating would hang")
    done = subprocess.run(
        [sys.executable, *WAYS[way], f"{ROOT}/examples/{name}.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [size] = re.findall(FOUND, done.stderr)
    assert ("of 2 processes" in done.stderr) == (way != "python")
    assert done.stdout.count(f"'adaptive/micro_batch': {size},") == 4, done.stdout
