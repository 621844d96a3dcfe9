"""Files of other trainers, like the examples of their projects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "data" / "trainer_files"


def given(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


def changed(folder: Path, path: str, **changes: Any) -> Path:
    """A copy of a file with other keys."""
    copy = folder / f"{Path(path).name}.yaml"
    copy.write_text(yaml.safe_dump({**given(FOLDER / f"{path}.yaml"), **changes}))
    return copy
