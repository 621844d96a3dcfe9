"""The private interfaces of other libraries that this package uses, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def pass_loader_through(trainer: Any, change: Callable[[Any], Any]) -> None:
    """Change the loader of training before Lightning's trainer looks at it, wherever it comes from."""
    source = trainer.fit_loop._data_source
    source.dataloader = lambda: change(type(source).dataloader(source))
