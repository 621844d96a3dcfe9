"""What is put in the place of something of another library, for as long as this process lives."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def put(owner: Any, name: str, value: Any) -> Any:
    """Put a value there, and give what has been there."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return before


class WhenImported(MetaPathFinder):
    """Calls functions with modules of the program when it has imported them."""

    def __init__(self) -> None:
        self._functions: defaultdict[str, list[Callable[[Any], None]]] = defaultdict(list)
        sys.meta_path.insert(0, self)

    def call(self, module: str, function: Callable[[Any], None]) -> None:
        """Call a function once a module is imported, or now if it is already."""
        if module in sys.modules:
            function(sys.modules[module])
        else:
            self._functions[module].append(function)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._functions:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            # Who only asks whether it is there does not import it.
            spec.loader = _Followed(spec.loader, partial(self._functions.pop, name, ()))
        return spec


class _Followed(Loader):
    """A loader of a module, and functions that are called with it then."""

    def __init__(
        self, loader: Any, functions: Callable[[], Sequence[Callable[[Any], None]]]
    ) -> None:
        self._loader, self._functions = loader, functions

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for function in self._functions():
            function(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
