"""What the answer of a program says besides its numbers."""

from __future__ import annotations

_noted: dict[str, None] = {}


def note(line: str) -> None:
    """Note what is to be said about a plan."""
    _noted[line] = None


def noted() -> tuple[str, ...]:
    """What has been noted."""
    return tuple(_noted)
