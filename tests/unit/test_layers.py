"""The packages: imports point one way, down, and come in by a package's interface."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import torchtune_adaptive

PACKAGE = Path(torchtune_adaptive.__file__).parent
MAY_IMPORT = {
    "common": set(),
    "core": {"common"},
    "planner": {"common", "core"},
    "library": {"common", "core", "planner"},
    "schedule": {"common", "core"},
    "recipe": {"common", "core", "planner", "schedule"},
    "cli": {"common", "core", "planner", "recipe"},
    "__main__": {"cli"},
}
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
}
WITHOUT_TORCH = ("common", "schedule", "core.sizes", "planner.memory", "planner.speed")
FOREIGN = {"omegaconf", "yaml", "torchtune", "torchao", "torchtune_adaptive.recipe"}


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """The modules of ours that a file imports from, each with the name that it takes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torchtune_adaptive"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def loaded_by(program: str) -> set[str]:
    program += "\nimport sys; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    return {
        *subprocess.run(
            command, check=True, timeout=60, capture_output=True, text=True
        ).stdout.split()
    }


def test_other_packages_come_in_by_their_interface() -> None:
    assert {path.stem for path in PACKAGE.iterdir()} - {"__init__", "py", "__pycache__"} == {
        *MAY_IMPORT
    }
    for name, path in MODULES.items():
        package = name.split(".")[1]
        for module, what in imported(path) if package != "__init__" else ():
            other = f"{module}.{what}".split(".")[1]
            if other in ("__version__", package):
                continue
            assert other in MAY_IMPORT[package], f"{name} must not import {other}"
            known = (
                sys.modules[module] if module in sys.modules else __import__(module, fromlist=["*"])
            )
            assert (
                module == f"torchtune_adaptive.{other}" and what in known.__all__
            ) or other == "schedule", (
                f"{name} imports {what} from {module}, past the interface of {other}"
            )


def test_no_imports_in_a_circle() -> None:
    graph = {
        name: {
            each for pair in imported(path) for each in (pair[0], ".".join(pair)) if each in MODULES
        }
        for name, path in MODULES.items()
        if path.name != "__init__.py"  # names are loaded when they are used
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which lists the modules


@pytest.mark.parametrize(("package", "most"), [("core", 40), ("planner", 25), ("library", 10)])
def test_interfaces_are_narrow_and_need_no_config(package: str, most: int) -> None:
    names = __import__(f"torchtune_adaptive.{package}", fromlist=["*"]).__all__
    assert len(names) <= most and f"{package}.{package}" not in names
    program = f"from torchtune_adaptive.{package} import {', '.join(names)}"
    assert not loaded_by(program) & FOREIGN


def test_arithmetic_needs_no_torch() -> None:
    paths = [name for name in MODULES if name.partition(".")[2].startswith(WITHOUT_TORCH)]
    assert "torch" not in loaded_by("\n".join(f"import {name}" for name in paths))


def test_accelerators_are_named_in_one_folder() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())) if path.parent.name != "device" else ():
            if isinstance(node, ast.Attribute) and node.attr in ("cuda", "xpu", "mps"):
                raise AssertionError(f"{path.name}:{node.lineno} names an accelerator")
