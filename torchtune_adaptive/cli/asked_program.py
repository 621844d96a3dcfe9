"""A program that is to be planned, as the user gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtune_adaptive.planner import programs


@dataclass(frozen=True)
class AskedProgram:
    """A program as the user gives it."""

    program: programs.Program
    command: tuple[str, ...]
    """What to type for it after ``tune-adaptive plan``, but for the GPU and what a page changes."""
    rows_key: str = "--rows"
    """What says the rows of a batch."""
    settings: Mapping[str, Any] | None = None
    """Those of a trainer, if the program is one that trains by settings."""
    about: Sequence[str] = ()
    """What is known before it runs, for people."""

    def with_settings(self, **changes: Any) -> programs.Program:
        """The program that trains with other settings."""
        settings = {**(self.settings or {}), **changes}
        return replace(self.program, words=programs.words_of_trainer(settings))
