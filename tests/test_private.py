"""What is not ours to rely on or to change: private interfaces, and other libraries on import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torchtune_adaptive

PACKAGE = Path(torchtune_adaptive.__file__).parent
PRIVATE_MODULE = re.compile(r"(torch|torchtune|torchao|torchdata)(\.\w+)*\._[A-Za-z][\w.]*")
ALLOWED = {"_exit", "_replace", "_component_"}
"""Documented, of ``os`` and of named tuples; a key of configs."""
OPERATORS = re.compile(r"(torch\.ops|_aten)\.")
"""Operators have names of their own, which may begin with an underscore."""
BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in ALLOWED


def used_by(node: ast.AST) -> Iterator[str]:
    """The private interfaces of others that a piece of code names."""
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names if PRIVATE_MODULE.match(each.name))
    elif isinstance(node, ast.ImportFrom):
        names = (f"{node.module}.{each.name}" for each in node.names)
        yield from (name for name in names if PRIVATE_MODULE.match(name))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if PRIVATE_MODULE.fullmatch(node.value):
            yield node.value
    elif isinstance(node, ast.Attribute) and is_private(node.attr):
        whole = ast.unparse(node)
        if ast.unparse(node.value) not in ("self", "cls") and not OPERATORS.match(whole):
            yield whole
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
        names = (str(each.value) for each in node.args[1:2] if isinstance(each, ast.Constant))
        yield from filter(is_private, names)


def found_in(text: str) -> list[str]:
    return [name for node in ast.walk(ast.parse(text)) for name in used_by(node)]


def test_private_interfaces_stand_in_one_module_of_each_package() -> None:
    paths = [*PACKAGE.rglob("*.py")]
    found = {path.relative_to(PACKAGE).as_posix(): found_in(path.read_text()) for path in paths}
    apart = {name: uses for name, uses in found.items() if name.endswith("/private.py")}
    assert len(apart) == 7 and all(apart.values())  # one of planner/programs, too
    assert not {name: uses for name, uses in found.items() if uses and name not in apart}


def test_every_way_to_use_one_is_seen() -> None:
    for line in (
        "import torch._dynamo.config",
        "from torch._subclasses import FakeTensor",
        "from torch.utils._pytree import tree_leaves",
        "from torchtune.training import _activation_offloading",
        "import_module('torchtune._cli.run')",
        "import_module(f'torchtune._cli.{name}')",
        "torch._C",
        "self.root._get_fsdp_state()",
        "optimizer._state = 1",
        "getattr(module, '_buffers', None)",
    ):
        assert found_in(line), line
    for line in (
        "self._own",
        "cfg.loss._component_",
        "torch.ops.aten._pin_memory",
        "one._replace()",
    ):
        assert not found_in(line), line


IMPORT_ALL = """
import importlib, logging, os, pkgutil, sys, warnings
import torch, torchtune, torchtune.utils
hooks, register = [], os.register_at_fork
def registering(**functions):
    hooks.extend(each.__module__ for each in functions.values())
    register(**functions)
os.register_at_fork = registering
def state():
    loggers = [logging.getLogger(name) for name in (None, "torchtune.utils._logging", "torch")]
    said = [(each.filters, each.level, each.handlers, each.disabled) for each in loggers]
    return repr((said, logging.root.manager.disable, warnings.filters, dict(os.environ)))
OWN_PROCESS = ("torchtune_adaptive.recipe.plan.preload", "torchtune_adaptive.cli.preloaded",
    "torchtune_adaptive.library.preload", "torchtune_adaptive.__main__")
BESIDE_AXOLOTL = ("torchtune_adaptive.integrations.axolotl",)  # which loads it
import torchtune.datasets, torchao, matplotlib
before = state()
import torchtune_adaptive
for each in pkgutil.walk_packages(torchtune_adaptive.__path__, "torchtune_adaptive."):
    if each.name not in OWN_PROCESS + BESIDE_AXOLOTL:
        importlib.import_module(each.name)
assert state() == before, (before, state())
from omegaconf import OmegaConf
def changed():
    ours = [name for name in hooks if name.startswith("torchtune_adaptive")]
    filters = len(torchtune.utils.get_logger().filters)
    return [OmegaConf.has_resolver("tiny_assets"), len(ours), filters]
assert changed() == [False, 0, 0], changed()
from torchtune_adaptive.recipe.registry import find_config
for _ in range(2):
    find_config("tiny/full")
    assert changed() == [True, 1, 1], changed()
"""


def test_importing_changes_nothing_in_other_libraries_and_loading_a_config_does_it_once() -> None:
    command = [sys.executable, "-c", IMPORT_ALL]
    run = subprocess.run(command, timeout=300, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
