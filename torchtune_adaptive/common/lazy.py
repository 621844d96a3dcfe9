"""The public names of a package, loaded when they are first used.

A package lists its interface once, as imports under ``if TYPE_CHECKING:`` in its ``__init__``. Type checkers
and readers see ordinary imports; at run time each name is imported when somebody asks for it. So importing
one name does not import what the others need.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def interface(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` for the ``__init__`` of a package, given its name."""
    module = sys.modules[package]
    where = _typed_imports(Path(str(module.__file__)))

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        source = import_module(where[name])
        path = f"{source.__name__}.{name}"
        is_module = hasattr(source, "__path__") and find_spec(path) is not None
        value = import_module(path) if is_module else getattr(source, name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *where}), sorted(where)


def _typed_imports(path: Path) -> dict[str, str]:
    """The names imported under ``if TYPE_CHECKING:``, and the modules that they come from."""
    return {
        alias.name: str(node.module)
        for block in ast.parse(path.read_bytes()).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
