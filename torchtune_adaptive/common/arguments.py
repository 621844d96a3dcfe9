"""Checks of single arguments: each returns the value, or raises a ``UsageError`` that names the argument."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

from torchtune_adaptive.common.errors import ConfigError, UsageError
from torchtune_adaptive.common.text import amount_of_memory

T = TypeVar("T")
MOST = (1 << 31) - 1
"""The largest whole number that an argument may be."""


def function(name: str, value: T) -> T:
    """Something that can be called."""
    if not callable(value):
        raise UsageError(f"{name}: {value!r} is not a function.")
    return value


def whole(name: str, value: Any, at_least: int = 1) -> int:
    """A whole number, of whatever integer type."""
    if (number := _whole(value)) is None or not at_least <= number <= MOST:
        raise UsageError(f"{name}: {value!r} must be a whole number, {at_least} or more.")
    return number


def _whole(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def whole_or_never(name: str, value: Any) -> int | None:
    """A whole number, or None for ``"never"``."""
    if value == "never":
        return None
    if _whole(value) is None:
        raise UsageError(f"{name}: {value!r} must be a whole number, 1 or more, or 'never'.")
    return whole(name, value)


def seconds(name: str, value: Any) -> float:
    """A finite number, 0 or more."""
    if not _is_number(value) or not 0 <= value < math.inf:
        raise UsageError(f"{name}: {value!r} must be a number of seconds, 0 or more.")
    return float(value)


def weight(name: str, value: Any) -> float:
    """A finite number, 0 or more, by which something counts."""
    if not _is_number(value) or not 0 <= value < math.inf:
        raise UsageError(f"{name}: {value!r} must be a number, 0 or more.")
    return float(value)


def norm(name: str, value: Any) -> float | None:
    """A number above 0, or None."""
    if value is not None and not (_is_number(value) and value > 0):
        raise UsageError(
            f"{name}: {value!r} must be a number above 0; None to leave gradients as they are."
        )
    return value


def share(name: str, value: Any) -> float:
    """A part of a whole, of which something must be left."""
    if not _is_number(value) or not 0 <= value < 1:
        raise UsageError(f"{name}: {value!r} must be a share: 0 or more, and less than 1.")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def one_of(name: str, value: T, names: Sequence[Any]) -> T:
    """One of the names that are allowed."""
    if value not in names:
        raise UsageError(f"{name}: {value!r} must be one of: {', '.join(map(repr, names))}.")
    return value


def memory(name: str, value: Any) -> int | None:
    """Bytes; None if none are given."""
    try:
        return None if value is None else amount_of_memory(name, value)
    except ConfigError as error:  # which is for configs
        raise UsageError(str(error)) from None
