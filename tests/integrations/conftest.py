"""Tests against the real libraries run where these are; see ``test_beside_trl``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

NAMES = {path.name for path in Path(__file__).parent.glob("real/test_*.py")}
OF_TORCHTITAN = {name for name in NAMES if name.startswith("test_torchtitan")}
OF_AXOLOTL = {"test_axolotl.py"}
OF_TRITON = {"test_triton.py"}
OF_OTHERS = NAMES - OF_TORCHTITAN - OF_AXOLOTL - OF_TRITON
NEEDED = (
    (OF_TORCHTITAN, ("torchtitan",)),
    (OF_AXOLOTL, ("axolotl",)),
    (OF_TRITON, ("triton", "torchtune")),
    (OF_OTHERS, ("trl",)),
)
collect_ignore = [
    f"real/{name}"
    for names, libraries in NEEDED
    if not all(map(find_spec, libraries))
    for name in names
]
