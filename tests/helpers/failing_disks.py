"""Runs on a disk that fails: what torch, safetensors and Python do with files is answered by ``eio.c``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_START = "from tests.helpers.failing_disks import _main; _main()"


@dataclass(frozen=True)
class Failure:
    """What a disk does, see ``eio.c``."""

    operation: str
    part: str
    """Parts of the paths for which it does, with colons between them."""
    error: int

    @property
    def environment(self) -> dict[str, str]:
        return {
            "FAILS_AT": self.operation,
            "FAILS_FOR": self.part,
            "FAILS_WITH": str(self.error),
        }


def library(folder: Path) -> Path:
    """What processes are started with whose disk can fail; without a compiler, the test is skipped."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) for the disk that fails")
    built = folder / "eio.so"
    source = Path(__file__).with_name("eio.c")
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", built, source]
    subprocess.run(command, check=True, timeout=60)
    return built


def start(code: str, library: Path, given: str = "", **environment: str) -> str:
    """Start Python on a disk that can fail; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=given,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(library), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def failing_runs(
    library: Path, runs: Sequence[tuple[Failure, Path, dict[str, Any]]], ranks: int
) -> list[str]:
    """What runs of the tiny config end with, each in a folder, with changes, on a disk that fails."""
    given = [(asdict(failure), str(folder), changes) for failure, folder, changes in runs]
    said = start(_START, library, json.dumps([ranks, given]))
    return json.loads(said.splitlines()[-1])  # type: ignore[no-any-return]


def _main() -> None:
    from tests.helpers.ranks import run_ranks
    from tests.helpers.recipes import tiny_config

    said = []
    ranks, runs = json.load(sys.stdin)
    for failure, folder, changes in runs:
        cfg = tiny_config("full", folder, **changes)
        try:
            run_ranks(_run, ranks, Failure(**failure).environment, cfg, join=False, timeout=120)
        except AssertionError as error:
            said.append(str(error))
        else:
            said.append("")
    print(json.dumps(said))


def _run(environment: dict[str, str], cfg: Any) -> None:
    from tests.helpers.recipes import run_ours

    os.environ.update(environment)
    run_ours("full", cfg)
