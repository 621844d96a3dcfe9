"""Scripts of ``benchmarks``, which import each other as programs do."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

FOLDER = Path(__file__).parents[2] / "benchmarks"


def benchmark(name: str) -> dict[str, Any]:
    """What a script defines."""
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        return runpy.run_path(str(FOLDER / f"{name}.py"))
