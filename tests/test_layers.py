"""The packages: imports point one way, down, and come in by a package's interface."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import torchtune_adaptive

PACKAGE = Path(torchtune_adaptive.__file__).parent
MAY_IMPORT = {
    "common": set(),
    "core": {"common"},
    "planner": {"common", "core"},
    "library": {"common", "core", "planner"},
    "integrations": {"common", "core", "library"},
    "schedule": {"common", "core"},
    "recipe": {"common", "core", "planner", "schedule"},
    "cli": {"common", "core", "planner", "library", "recipe"},
    "adapt": {"integrations"},
    "__main__": {"cli"},
}
FOLDERS = {
    "core": "private sizes device ranks rows step search",
    "planner": "private told workers gpu_names speed memory repetition deep_step other_lengths trace "
    "traced_run step_table steps_by_choice programs",
    "recipe": "private shadowing versions signals tiny install upstream settings "
    "registry components rewards data setup rollout checkpoints kinds train proofreading tracing plan "
    "search origin record training run rollout_run adaptive_recipe launch stable",
}
"""The folders and modules of a package, from the lowest: each may import those before it."""
OWN_WHEEL = ("core", "planner", "library", "integrations", "cli")
"""What the library's wheel has, apart from ``common``; that of the recipes has ``recipe``."""
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
}
WITHOUT_TORCH = (
    "common",
    "schedule",
    "core.sizes",
    "planner.memory",
    "planner.speed",
    "planner.deep_step",
    "planner.other_lengths",
    "planner.step_table",
    "planner.programs.process",
    "planner.told",
    "planner.workers",
    "library.transformers_step",
    "cli.other_trainers",
    "cli.transformers_plan",
)
FOREIGN = {"omegaconf", "yaml", "torchtune", "torchao", "torchtune_adaptive.recipe"}


def when_run(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree but for what only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from when_run(node)


def imported(
    name: str, nodes: Callable[[ast.AST], Iterable[ast.AST]] = ast.walk
) -> Iterator[tuple[str, str]]:
    """The modules of ours that a module imports from, each with the name that it takes."""
    for node in nodes(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torchtune_adaptive"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def loaded_by(program: str) -> set[str]:
    command = [sys.executable, "-c", f"{program}\nimport sys\nprint(*sys.modules)"]
    done = subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    return {*done.stdout.split()}


ON_CUDA = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda device=None: (9, 0)
def initialize():
    raise AssertionError("CUDA is initialized by an import")
torch.cuda._lazy_init = torch.cuda.init = initialize
from torchtune.utils._import_guard import _SUPPORTS_FLEX_ATTENTION
assert _SUPPORTS_FLEX_ATTENTION
import importlib, tests.helpers.preload
"""


@pytest.mark.exhaustive
def test_no_import_initializes_cuda() -> None:
    """Loaders and traces are forked after imports, and CUDA does not survive a fork.

    torchtune's own import asks the device what it can do, which this answers.
    """
    names = {name.removesuffix(".__init__") for name in MODULES} - {"torchtune_adaptive.__main__"}
    names.remove("torchtune_adaptive.integrations.axolotl")  # needs axolotl
    program = f"{ON_CUDA}\nfor name in {sorted(names)}: importlib.import_module(name)"
    assert names <= loaded_by(program)


def test_packages_import_lower_ones_by_their_interface() -> None:
    assert {name.split(".")[1] for name in MODULES} == {*MAY_IMPORT, "__init__"}
    for name in MODULES:
        package = name.split(".")[1]
        for module, what in imported(name) if package != "__init__" else ():
            other = f"{module}.{what}".split(".")[1]
            if other in (package, "__version__") or module == "torchtune_adaptive.common.lazy":
                continue
            assert other in MAY_IMPORT[package], f"{name} must not import {other}"
            interface = import_module(f"torchtune_adaptive.{other}")
            assert module == interface.__name__, f"{name}: import from {interface.__name__}"
            assert other == "schedule" or what in interface.__all__, f"{name}: {other}.{what}"


@pytest.mark.parametrize("package", FOLDERS)
def test_folders_of_a_package_import_lower_ones(package: str) -> None:
    height = {name: at for at, name in enumerate(FOLDERS[package].split())}
    within = f"torchtune_adaptive.{package}."
    modules = [name for name in MODULES if name.startswith(within) and name.count(".") >= 2]
    folders = {name: name.removeprefix(within).split(".")[0] for name in modules}
    assert {*folders.values()} - {"__init__"} == {*height}
    for name, folder in folders.items():
        for module, what in imported(name, when_run) if folder != "__init__" else ():
            if f"{module}.".startswith(within):
                other = f"{module}.{what}".removeprefix(within).split(".")[0]
                assert height[other] <= height[folder], f"{name} must not import {other}"


def test_every_folder_says_what_it_is_for() -> None:
    for name, path in MODULES.items():
        if name.endswith("__init__"):
            assert len(str(ast.get_docstring(ast.parse(path.read_text()))).split()) >= 10, name


def test_no_imports_in_a_circle() -> None:
    graph = {
        name: {each for a, b in imported(name) for each in (a, f"{a}.{b}") if each in MODULES}
        for name in MODULES
        if not name.endswith("__init__")  # it loads names when they are used
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which lists the modules


@pytest.mark.parametrize(
    ("package", "most"), [("core", 45), ("planner", 30), ("library", 15), ("integrations", 5)]
)
def test_interfaces_are_narrow(package: str, most: int) -> None:
    names = import_module(f"torchtune_adaptive.{package}").__all__
    assert len(names) <= most, "is each of them one concept that other packages must know?"


def test_the_library_loads_no_config() -> None:
    packages = [f"torchtune_adaptive.{name}" for name in OWN_WHEEL]
    public = [f"from {each} import {', '.join(import_module(each).__all__)}" for each in packages]
    assert not loaded_by("\n".join(public)) & {
        *FOREIGN,
        "transformers",
        "trl",
        "lightning",
        "torchtitan",
    }
    # The command that works without the recipes reads settings and a machine as YAML.
    assert not loaded_by("import torchtune_adaptive.cli.plan_options") & (FOREIGN - {"yaml"})


def test_arithmetic_needs_no_torch() -> None:
    names = {name for name in MODULES if name.partition(".")[2].startswith(WITHOUT_TORCH)}
    assert "torch" not in loaded_by("\n".join(f"import {name}" for name in names))


def test_accelerators_are_named_in_one_folder() -> None:
    for name in MODULES:
        for node in ast.walk(ast.parse(MODULES[name].read_text())):
            named = isinstance(node, ast.Attribute) and node.attr in ("cuda", "xpu", "mps")
            places = (".core.device.", ".planner.programs.")  # what shows one to programs
            assert not named or any(place in name for place in places), f"{name}:{node.lineno}"


@pytest.mark.parametrize("folder", ["benchmarks", "demos", "examples"])
def test_what_other_programs_import_is_there(folder: str) -> None:
    """Most of them run only now and then, so a name that has moved would not be missed."""
    for file in sorted((PACKAGE.parent / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module and module.split(".")[0] == "torchtune_adaptive":
                exec(ast.unparse(node), {})


def test_no_test_imports_another() -> None:
    """What several need is in ``tests/helpers``, so that a test can be moved or removed by itself."""
    for file in sorted((PACKAGE.parent / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            last = (module or "").rpartition(".")[2]
            assert not last.startswith("test_"), f"{file}: {module}"


def test_no_two_classes_have_one_name() -> None:
    classes = [
        node.name
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    twice = {name for name, times in Counter(classes).items() if times > 1}
    assert twice == {
        "AdaptiveTrainerMixin",  # public, in integrations.transformers and integrations.torchtitan
        "Kernel",  # of the roofline, and what stands for inductor's inside of a function
    }
