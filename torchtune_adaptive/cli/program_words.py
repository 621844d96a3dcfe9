"""The command line of ``plan train.py ...``: what is for ``plan``, and what is the program's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.planner import programs

_WITH_VALUE = (
    *(
        "--gpu",
        "--nproc",
        "--nodes",
        "--memory",
        "--rows",
        "--max-length",
        "--seq-len",
        "--assume",
        "--compare",
    ),
    *("--tokens", "--price", "--power", "--links", "--network", "--html"),
)
_ALONE = ("--json", "--markdown", "--no-what-ifs", "--show-output")
"""Options of ``plan`` that may stand among those of the program."""


class CommandLine(NamedTuple):
    """A command line: what is for ``plan``, and what is the program with its arguments."""

    words: list[str]
    program: tuple[str, ...]


def split(words: Sequence[str]) -> CommandLine:
    """Find the program on a command line: a script, ``-m`` and a module, or a command. All that follows is
    the program's own, but for options of ``plan``; what follows ``--`` is so in any case."""
    words = [*words]
    explicit = "--" in words
    begin = words.index("--") + 1 if explicit else _begin(words)
    if begin is None or begin >= len(words):
        return CommandLine(words, ())
    own, program = words[: begin - explicit], words[begin:]
    if explicit:
        return CommandLine(own, tuple(program))
    head = 2 if program[0] == "-m" else 1
    kept, rest = program[:head], iter(program[head:])
    for word in rest:
        name = word.partition("=")[0]
        if name in _WITH_VALUE:
            own += [word] if "=" in word else [word, next(rest, "")]
        elif name in _ALONE:
            own.append(word)
        else:
            kept.append(word)
    return CommandLine(own, tuple(kept))


def _begin(words: Sequence[str]) -> int | None:
    """Where the program begins, if there is one."""
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        if word == "-m":
            return at
        if word.startswith("-") or before in _WITH_VALUE:
            continue
        is_option = before.startswith("-") and before not in _ALONE
        if word.endswith(".py"):
            return None if _is_recipe(word, words) else at
        if not is_option and programs.command(word):
            return at
    return None


def _is_recipe(path: str, words: Sequence[str]) -> bool:
    """Whether a script is a recipe of torchtune's, which may stand before its config."""
    if not any(word.partition("=")[0] == "--config" for word in words):
        return False
    return not Path(path).is_file() or "config.parse" in Path(path).read_text(errors="replace")


def require_program(words: Sequence[str]) -> None:
    """Raise if there is no such program.

    Raises:
        ConfigError: there is none.
    """
    if words[0] != "-m" and not Path(words[0]).is_file() and not programs.command(words[0]):
        remedy = "Give the path of a script, or the command of an installed package"
        raise ConfigError("PROGRAM", words[0], "is not a file", remedy)


def assumed(given: Sequence[str]) -> dict[str, Any]:
    """The values that ``--assume train.py:31=0.5`` gives, by the place."""
    values = {}
    for one in given:
        place, equals, value = one.partition("=")
        if not equals or not place.rpartition(":")[2].isdigit():
            remedy = "Write it as the error says, for example train.py:31=0.5"
            raise ConfigError("--assume", one, "is not a place and a value", remedy)
        values[place] = yaml.safe_load(value)
    return values
