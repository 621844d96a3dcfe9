"""A script as it is, with adaptive trainers: ``python -m torchtune_adaptive.adapt train.py ...``.

Each trainer of transformers or TRL that the script makes, and of its own subclasses of these, is made of
``integrations.transformers.adaptive(...)`` of its class.
"""

from __future__ import annotations

import argparse
import ast
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from torchtune_adaptive.common import UsageError, announce
from torchtune_adaptive.integrations.options import Adaptive

log = logging.getLogger(__name__)
_PROGRAM = "python -m torchtune_adaptive.adapt"


def run_script(arguments: Sequence[str] | None = None) -> None:
    """The command: run a script with adaptive trainers."""
    asked = _parser().parse_args(arguments)
    if not asked.script:
        _parser().error("which script? Its path is missing")
    name, *rest = asked.script
    try:
        if not asked.module and not Path(name).is_file():
            raise UsageError(f"{name}: there is no such script. A module is run by -m {name}")
        options = Adaptive(**{f.name: getattr(asked, f.name) for f in fields(Adaptive)})
        made = adapt_trainers(options, name)
        sys.argv = [name, *rest]
        sys.addaudithook(partial(_say_where_it_trains, name, made))
        if asked.module:
            sys.path[0] = os.getcwd()
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(name).resolve().parent)
            runpy.run_path(name, run_name="__main__")
    except UsageError as error:
        sys.exit(f"{_PROGRAM}: {error}")
    if not made:
        _say(
            f"{name} has made no trainer of transformers or TRL: nothing is adaptive",
            logging.WARNING,
        )


def adapt_trainers(options: Adaptive, maker: str) -> dict[type, type]:
    """Have every trainer that is made from now on be adaptive; gives the class of each class that was made.

    ``Trainer.__new__`` makes an object of the adaptive subclass instead. As that is an instance of the class
    that was called, Python goes on with its ``__init__``. So it does not matter where a script has its
    trainers from, nor in which order it imports them. ``maker`` is what makes them, for a message.
    """
    try:
        from transformers import Trainer

        from torchtune_adaptive.integrations.mixin import AdaptiveMixin
        from torchtune_adaptive.integrations.transformers import adaptive
    except ImportError as error:
        raise UsageError(
            f"transformers' Trainer cannot be imported ({error}). pip install transformers accelerate"
        ) from error
    made: dict[type, type] = {}

    def new(kind: type, *_: Any, **__: Any) -> Any:
        if issubclass(kind, AdaptiveMixin):  # by the script itself
            return object.__new__(kind)
        if kind not in made:
            made[kind] = adaptive(kind, options)
            _say(f"{kind.__name__} of {maker} is made adaptive")
        return object.__new__(made[kind])

    Trainer.__new__ = new
    return made


def _say_where_it_trains(name: str, made: dict[type, type], event: str, details: Any) -> None:
    """An audit hook that says so where a script that has made no trainer starts another, to train there."""
    starts = event == "subprocess.Popen" and not made
    script = [*map(os.fsdecode, details[1][1:3])] if starts else []
    if script and (script[0] == "-m" or script[0].endswith(".py")):
        told = " ".join(script[: 1 + (script[0] == "-m")])
        _say(
            f"{name} starts {told}, whose trainers are not adaptive. Run {_PROGRAM} {told} ... instead.",
            logging.WARNING,
        )


def _say(line: str, level: int = logging.INFO) -> None:
    announce(log, line, level, rank_zero=os.environ.get("RANK", "0") == "0")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        usage="%(prog)s [OPTIONS] [-m] SCRIPT [ITS ARGUMENTS]",
        description="Run a script as it is. The trainers of transformers and TRL that it makes find their "
        "micro-batch and survive running out of memory.",
        epilog="On several processes: torchrun --nproc_per_node 2 -m torchtune_adaptive.adapt SCRIPT",
        allow_abbrev=False,
    )
    for option in fields(Adaptive):
        parser.add_argument(
            f"--{option.name.replace('_', '-')}",
            dest=option.name,
            type=_value,
            default=option.default,
            metavar="VALUE",
            help=f"{option.name} of Adaptive; by default {option.default}",
        )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="run a module, as python -m does"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _value(text: str) -> Any:
    """A number or truth value as such, anything else as text."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
