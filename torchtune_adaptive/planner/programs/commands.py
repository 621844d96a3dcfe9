"""Begins a program as its command line says: a script, a module, or a command of a package, such as ``trl``.

A launcher starts a process for the program that it launches. Here, that program goes on in this one, as the
first of its processes; no other process is started.
"""

from __future__ import annotations

import errno
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, NoReturn

from torchtune_adaptive.planner.programs.imports import WhenImported, put

_PYTHON = re.compile(r"python[0-9.]*")
_WITH_VALUE = ("-W", "-X")
"""Options of Python that have a value."""


def command(name: str) -> EntryPoint | None:
    """What an installed package calls by this name, if one does."""
    if "." in name or os.sep in name:
        return None
    return next(iter(entry_points(group="console_scripts", name=name)), None)


def execute(words: Sequence[str]) -> None:
    """Run a program in this process as it would run in one of its own."""
    head, sys.argv = words[0], [*words]
    found = command(head)
    if head == "-m":
        head, sys.argv = words[1], [*words[1:]]
        spec = find_spec(head)
        if (
            spec is not None
            and spec.submodule_search_locations
            and not find_spec(f"{head}.__main__")
        ):
            found = command(head)  # a package that Python cannot run
    if found is not None:
        sys.exit(found.load()())
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(head, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(head)))
        runpy.run_path(head, run_name="__main__")


def follow(imports: WhenImported) -> None:
    """Let launchers launch in this process from now on."""
    put(subprocess.Popen, "__init__", _begun)
    put(os, "system", lambda *_: 127 << 8)
    imports.call("torch.distributed.launcher.api", _of_launcher)
    imports.call("torch.multiprocessing", lambda it: put(it, "spawn", _first_of_spawned))
    for name in ("multiprocessing", "torch.multiprocessing", "multiprocess"):
        imports.call(name, _of_processes)


def _of_processes(processes: Any) -> None:
    """Let other processes be forks, which know of the plan, whatever the program asks for."""
    get = processes.get_context
    put(processes, "get_context", lambda method=None: get(method and "fork"))
    put(processes, "set_start_method", lambda *_, **__: None)


def _first_of_spawned(function: Callable[..., Any], args: Any = (), *_: Any, **__: Any) -> NoReturn:
    function(0, *args)
    sys.exit()


def _begun(
    _: Any, args: Any, *others: Any, env: Any = None, cwd: Any = None, **__: Any
) -> NoReturn:
    words = [args] if isinstance(args, (str, bytes, os.PathLike)) else [*args]
    program = _program([os.fsdecode(word) for word in words])
    if not program:
        reason = "a plan starts no other program"
        raise FileNotFoundError(errno.ENOENT, reason, os.fsdecode(words[0]))
    _go_on(program, env, cwd)


def _program(words: list[str]) -> list[str]:
    """The program that a command runs in Python; empty if none."""
    name = os.path.basename(words[0])
    if not _PYTHON.fullmatch(name):
        return [name, *words[1:]] if command(name) else []
    rest = words[1:]
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        del rest[: 1 + (rest[0] in _WITH_VALUE)]
    return rest if rest and rest[0] not in ("-c", "-") else []


def _go_on(program: Sequence[str], env: Any = None, cwd: Any = None) -> NoReturn:
    """Become the process that is to run a program."""
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)
    execute(program)
    sys.exit()


def _of_launcher(launcher: Any) -> None:
    def begin(launch: Any, config: Any, entrypoint: Any) -> None:
        launch.first = partial(_first, config, entrypoint)

    put(launcher.elastic_launch, "__init__", begin)
    put(launcher.elastic_launch, "__call__", lambda launch, *arguments: launch.first(*arguments))


def _first(config: Any, entrypoint: str | Callable[..., Any], *arguments: Any) -> NoReturn:
    """The first of the processes that torch launches."""
    ranks = config.max_nodes * config.nproc_per_node
    variables = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "GROUP_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": config.nproc_per_node,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    if callable(entrypoint):
        sys.exit(entrypoint(*arguments))
    _go_on(_program([entrypoint, *map(str, arguments)]))
