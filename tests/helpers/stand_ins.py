"""Packages that cannot be installed here, replaced by what stands in for them in ``tests/stand_ins``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from unittest import mock

FOLDER = Path(__file__).parents[1] / "stand_ins"


def stand_in(name: str) -> None:
    """Import the stand-in of a package, so that others find it."""
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        importlib.import_module(name)
