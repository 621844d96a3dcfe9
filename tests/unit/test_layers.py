"""The layers of the package: imports point one way, down, and the lowest layer needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import torchtune_adaptive

PACKAGE = Path(torchtune_adaptive.__file__).parent
RECIPES = PACKAGE.parent / "recipes"

LAYERS = (
    # No torch, not even indirectly.
    {"settings", "batching", "memory_model", "time_model", "schedule"}
    | {"errors", "ending", "page", "versions", "shadowing", "durable", "cache", "text", "plots"},
    # What a step needs: the device's memory, and ranks that stay together.
    {"device", "ranks", "registry", "tiny", "tiny_vision", "upstream"},
    # One optimizer step, the rows that it takes, the objects that it is made of.
    {"step", "data", "setup"},
    # What kinds of recipe there are, and what they save.
    {"kinds", "checkpoints"},
    # Find what fits by trying, or without; train.
    {"search", "plan", "trace", "train"},
    # Entry points.
    {"recipe", "run", "record", "launch", "cli", "library"},
    {"__main__"},
)
# Otherwise the places of a layer do not know each other; those of the lowest do, but not in a circle.
MAY_IMPORT_IN_ITS_LAYER = {
    **dict.fromkeys(LAYERS[0], LAYERS[0]),
    "registry": {"tiny", "tiny_vision"},
    "tiny_vision": {"tiny"},
    "setup": {"step"},
    "search": {"plan"},
    "plan": {"trace"},
    "kinds": {"checkpoints"},
    "recipe": {"run"},
    "run": {"record"},
    "cli": {"launch"},
}


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, with the names that it takes from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def places_imported(path: Path) -> set[str]:
    """The folders and modules of the package, one level deep, that a file imports."""
    ours = (name.split(".") for name in imported(path) if name.startswith("torchtune_adaptive."))
    return {parts[1] for parts in ours}


def files_of(place: str) -> list[Path]:
    folder = PACKAGE / place
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def test_every_file_is_in_a_layer() -> None:
    found = {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")
    }
    assert found - {"__init__"} == set().union(*LAYERS)


def test_imports_point_down() -> None:
    for number, layer in enumerate(LAYERS):
        lower = set().union(*LAYERS[:number])
        for place in layer:
            allowed = lower | {place} | MAY_IMPORT_IN_ITS_LAYER.get(place, set())
            for path in files_of(place):
                wrong = places_imported(path) - allowed - {"__version__"}
                assert not wrong, f"{path.relative_to(PACKAGE)} must not import {sorted(wrong)}"


def test_no_imports_in_a_circle() -> None:
    modules = {
        ".".join(("torchtune_adaptive", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in PACKAGE.rglob("*.py")
    }
    graph = {
        module: {
            m for name in imported(path) for m in (name, name.rpartition(".")[0]) if m in modules
        }
        for module, path in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which lists the modules


def test_packages_hold_no_code_of_their_own() -> None:
    """Or importing one module of a folder would import others; ``device`` has the one factory."""
    for path in PACKAGE.glob("*/__init__.py"):
        assert path.parent.name == "device" or not path.read_text().strip(), path


def test_nothing_in_the_package_imports_a_recipe() -> None:
    recipes = {path.stem for path in RECIPES.glob("*.py")}
    for path in PACKAGE.rglob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & recipes


def test_the_lowest_layer_needs_no_torch() -> None:
    modules = [
        ".".join(("torchtune_adaptive", *path.relative_to(PACKAGE).with_suffix("").parts))
        for place in sorted(LAYERS[0])
        for path in files_of(place)
    ]
    program = "import sys\n" + "".join(f"import {module}\n" for module in modules)
    program += "assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_accelerators_are_named_in_one_folder() -> None:
    for path in [*PACKAGE.rglob("*.py"), *RECIPES.glob("*.py")]:
        if path.parent.name == "device":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("cuda", "xpu", "mps"):
                raise AssertionError(f"{path.name}:{node.lineno} names an accelerator")
