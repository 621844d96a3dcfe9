"""YAML files of somebody else, read as data that is no larger than the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from torchtune_adaptive.common.errors import ConfigError

_DEEPEST = 50
_MOST = 100_000
"""Values of a file, those of its aliases counted wherever they stand."""


def load_yaml(option: str, path: Path) -> Any:
    """What a file has.

    Raises:
        ConfigError: about ``option``, with what the reader says about the file.
    """
    try:
        text = path.read_text()
        require_bounded(text)
        return yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = f"cannot be read ({' '.join(str(error).split())})"
        raise ConfigError(option, str(path), reason, "Correct the file") from None


def require_bounded(text: str) -> None:
    """Look at YAML before it is built, which follows aliases and takes a stack for what is nested.

    Raises:
        YAMLError: it is nested too deeply, or is many times as large as it looks.
    """
    sizes: dict[str | None, int] = {}  # of what has an anchor
    within: list[tuple[str | None, int]] = []  # the anchors of what is open, and the sizes before
    size = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            within.append((event.anchor, size))
            sizes[event.anchor] = _MOST  # one that refers to itself has no end
            size = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = within.pop()
            sizes[anchor] = size
            size += before
        elif isinstance(event, yaml.AliasEvent):
            size += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            size += 1
        if len(within) > _DEEPEST:
            raise yaml.YAMLError(f"it is nested more than {_DEEPEST} deep")
        if size >= _MOST:
            raise yaml.YAMLError(f"with its aliases it has more than {_MOST:,} values")
