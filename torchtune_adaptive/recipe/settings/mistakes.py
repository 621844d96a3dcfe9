"""Mistakes in a config: the first one stops a run, and whoever corrects a config wants to see all.

What checks a config does so within ``each``: with ``FIRST`` it ends with the first mistake, and with
``Mistakes`` it goes on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from torchtune_adaptive.common import ConfigError

Each = AbstractContextManager[Any, bool | None]
FIRST: Each = nullcontext()


class Mistakes(AbstractContextManager["Mistakes", bool]):
    """A context that notes what is raised in it about a config. It may be entered again and again."""

    def __init__(self) -> None:
        self.found: list[ConfigError] = []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self.found.append(error)
        return True
