"""Tests against the real libraries run where these are; see ``test_beside_trl``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

OF_TORCHTITAN = [path.name for path in Path(__file__).parent.glob("real/test_torchtitan*.py")]
OF_OTHERS = [
    path.name
    for path in Path(__file__).parent.glob("real/test_*.py")
    if path.name not in OF_TORCHTITAN
]
collect_ignore = [
    f"real/{name}"
    for library, names in (("torchtitan", OF_TORCHTITAN), ("trl", OF_OTHERS))
    if not find_spec(library)
    for name in names
]
