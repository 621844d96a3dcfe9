"""Packages that are only installed where there is a GPU, and that a program finds all the same.

Where one is not installed, a module of ours takes its place. What asks which packages there are, and of what
version, is told of it too: programs and libraries do what they do on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from types import ModuleType
from typing import Any


class StandIn(DistributionFinder, MetaPathFinder, Loader):
    """Finds a package, of which ``module`` makes modules by their names, or None where there is no such. The
    name by which it is installed is that of its ``distribution``."""

    def __init__(
        self, distribution: str, version: str, package: str, module: Callable[[str], Any]
    ) -> None:
        self._distribution, self._version = distribution, version
        self._package, self._module = package, module

    def follow(self) -> bool:
        """Find it from now on, if it is not installed; gives whether it is not."""
        missing = PathFinder.find_spec(self._package) is None
        if missing:
            sys.meta_path.insert(0, self)
        return missing

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != self._package or self._module(name) is None:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).setdefault("__version__", self._version)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterator[Distribution]:
        asked = None if context is None else context.name
        if asked is None or asked.lower().replace("_", "-") == self._distribution:
            yield _Installed(self._distribution, self._version, self._package)


class _Installed(Distribution):
    """What is said about a package that is installed."""

    def __init__(self, name: str, version: str, package: str) -> None:
        self._files = {
            "METADATA": f"Name: {name}\nVersion: {version}\n",
            "top_level.txt": package,
        }

    def read_text(self, filename: str | PathLike[str]) -> str | None:
        return self._files.get(str(filename))

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)
