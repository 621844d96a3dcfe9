"""Runs that the command line launches."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.helpers.runs import BIN

QUICK = ["max_steps_per_epoch=2", "epochs=1", "adaptive_batching.cache=False"]


def launch(
    *command: str, cwd: Path, expect: int = 0, timeout: float = 300, **environment: str
) -> str:
    """Run a console script of this environment; everything that it said."""
    done = subprocess.run(
        [BIN / command[0], *command[1:]],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == expect, done.stdout
    return done.stdout


def losses(folder: Path) -> list[float]:
    (log,) = (folder / "logs").iterdir()
    return [float(loss) for loss in re.findall(r"(?<!_)loss:(-?\d+\.\d+\S*)", log.read_text())]
