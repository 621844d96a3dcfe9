"""Reads amounts of memory, as users write them."""

from __future__ import annotations

import re

from torchtune_adaptive.common.errors import ConfigError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}
_MOST_BYTES = 1 << 60
AMOUNT_OF_MEMORY = "an amount such as 24GiB, or a number of bytes"
"""The ways to write one, for messages."""


def amount_of_memory(key: str, value: object) -> int:
    """The bytes of ``24GiB``, ``512 MB`` or a plain number; ``ConfigError`` if it is none of these."""
    try:
        return parse_memory(value)
    except ValueError:
        raise ConfigError(key, value, "is not valid", f"Must be {AMOUNT_OF_MEMORY}") from None


def parse_memory(value: object) -> int:
    """The same, or ``ValueError``."""
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        if match and match[2] in _UNITS:
            size = int(float(match[1]) * _UNITS[match[2]])
            if 0 < size <= _MOST_BYTES:
                return size
    raise ValueError
