"""The steps of a program, kept for later, as long as all that it has read is as it was. No torch in here.

They do not depend on how much memory a GPU has. So another question about the same program is answered
without a run of it, and without torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from torchtune_adaptive.common import Cache, cache_folder, package_fingerprint
from torchtune_adaptive.planner.memory.peak import StartUp
from torchtune_adaptive.planner.memory.recorded_step import RecordedStep
from torchtune_adaptive.planner.programs.answer import NotRun, StepsOfProgram
from torchtune_adaptive.planner.programs.request import About, Program, Seen

_MOST_KEPT = 100
_SESSION = ("TERM", "WINDOW", "SSH_", "XDG_SESSION", "DBUS_", "VSCODE_", "TMUX", "STY", "COLORTERM")
_SHELL = ("_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "TMPDIR", "PYTEST_CURRENT_TEST")
"""Variables of the environment that differ from one terminal to another."""
_LARGEST = (
    "largest: computed from remembered runs, which were checked at {} rows, and not run itself"
)


class Remembered(NamedTuple):
    """What is remembered of a program."""

    steps: Mapping[str, RecordedStep] = {}
    about: Mapping[str, Any] = {}
    read: Collection[str] = ()
    """The files that it has read, or looked for."""


def kept_of(program: Program) -> Remembered:
    """What is remembered of a program; nothing if a file is not as it was."""
    found = _cache(program).get(_facts(program))
    if found is None or _now(found["read"]) != found["read"]:
        return Remembered()
    if found["card"] not in ("", program.gpu.name):
        return Remembered()
    steps = {name: RecordedStep.unpacked(one) for name, one in found["steps"].items()}
    seen, *others = found["about"]["about"]
    about = About(None if seen is None else Seen(*seen), *others)
    return Remembered(steps, {**found["about"], "about": about}, found["read"])


def keep(program: Program, kept: Remembered) -> None:
    """Remember a program."""
    steps = {name: step.packed() for name, step in kept.steps.items()}
    card = kept.about["about"].card
    value = {"about": kept.about, "card": card, "steps": steps, "read": _now(kept.read)}
    _cache(program).put(_facts(program), value)


def _cache(program: Program) -> Cache[dict[str, Any]]:
    return Cache(cache_folder(program.cache, "traces"), "traces", _are_kept, most=_MOST_KEPT)


class KeptSteps:
    """The steps of a program: those that are remembered, and others as they are ``run``. Without what runs
    them, one that is not remembered raises ``NotRun``."""

    compiled = False
    max_seq_len = None
    as_written = ""

    def __init__(self, kept: Remembered, run: StepsOfProgram | None = None) -> None:
        self._run = run
        self._steps, self._about = dict(kept.steps), dict(kept.about)

    def start_up(self, length: int) -> StartUp:
        if "set-up" not in self._steps:
            start_up = self._running.start_up(length)
            self._steps |= {"set-up": start_up.set_up, "first": start_up.first_step}
        return StartUp(self._steps["set-up"], self._steps["first"])

    def step(self, rows: int, length: int) -> RecordedStep:
        name = str(rows)
        if name not in self._steps:
            self._steps[name] = self._running.step(rows, length)
        return self._steps[name]

    noted = step

    def known(self) -> dict[tuple[int, int], RecordedStep]:
        return {}  # all rows are as long

    def known_first(self) -> dict[tuple[int, int], StartUp]:
        return {}

    @property
    def ranks(self) -> int:
        return int(self._fact("ranks"))

    @property
    def micro_batches(self) -> int:
        return int(self._fact("micro_batches"))

    @property
    def about(self) -> About:
        found = self._fact("about")
        assert isinstance(found, About)
        return found

    @property
    def has(self) -> Collection[int]:
        return [int(name) for name in self._steps if name.isdigit()]

    def unchecked(self, beyond: int) -> str:
        checked = [rows for rows in sorted(self.has) if rows > beyond]
        if not checked or self._about.get("irregular"):
            return ""
        return _LARGEST.format(", ".join(map(str, checked)))

    def kept(self, read: Collection[str], irregular: bool) -> Remembered:
        """All of this, which follows from the files that were ``read``."""
        for name in ("ranks", "micro_batches", "about"):
            self._fact(name)
        about = {**self._about, "irregular": irregular}
        return Remembered(self._steps, about, read)

    def _fact(self, name: str) -> Any:
        if name not in self._about:
            self._about[name] = getattr(self._running, name)
        return self._about[name]

    @property
    def _running(self) -> StepsOfProgram:
        if self._run is None:
            raise NotRun
        return self._run


def _facts(program: Program) -> dict[str, Any]:
    """What the runs of a program depend on, but for what it reads. Its words and the environment may have
    secrets."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _SHELL and not name.startswith(_SESSION)
    }
    secret = [program.words, sorted(environment.items()), os.getcwd(), sys.prefix, sys.version]
    return {
        "program": hashlib.sha256(json.dumps(secret).encode()).hexdigest(),
        "length": program.length,
        "ranks": program.ranks,
        "assumed": program.assumed,
        "GPU": program.gpu.capability,
        "code": package_fingerprint(),
    }


def _now(paths: Iterable[str]) -> dict[str, Any]:
    """Files, and the names in folders that end with a separator, as they are; None for what is not there."""
    return {path: _state(path) for path in paths}


def _state(path: str) -> Any:
    try:
        if path.endswith(os.sep):
            return hashlib.sha256("/".join(sorted(os.listdir(path))).encode()).hexdigest()
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return "a folder" if stat.S_ISDIR(found.st_mode) else [found.st_size, found.st_mtime_ns]


def _are_kept(value: Any) -> bool:
    try:
        for step in value["steps"].values():
            RecordedStep.unpacked(step)
        return isinstance(value["about"], Mapping) and isinstance(value["read"], Mapping)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return False
