"""``tune-adaptive``: torchtune's command line with our recipes and configs, and commands of our own.

Only the module of the command that is called is imported: torchtune's take seconds, and neither torchtune nor
the recipes need be installed where only the library's commands are called.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtune_adaptive import __version__
from torchtune_adaptive.cli import private
from torchtune_adaptive.cli.recipes import require_recipes
from torchtune_adaptive.common import (
    AdaptiveBatchingError,
    cached_files,
    human_bytes,
    printable,
    table,
    user_cache,
)

PROGRAM = "tune-adaptive"
_FASTEST = "use_fastest_configuration"
_FOUND = "batch_size_search.json"  # as in recipe/search/size_report.py, which needs torch
_FOUND_FASTEST = "fastest_configuration.json"  # as in recipe/search/fastest_report.py
_HELP = {
    "find": "Find the largest micro-batch that fits, or, with use_fastest_configuration=True, the "
    "fastest configuration, and print the overrides that use it.",
    "plan": "Predict peak memory and the largest micro-batch, without a GPU, weights or data.",
    "cache": "Show or clear what is cached from run to run.",
    "run": "Run a recipe; for several GPUs this takes all torchrun arguments.",
    "ls": "List all recipes and their configs.",
    "cat": "Print a config.",
    "cp": "Copy a recipe or a config to a local path.",
    "validate": "Check a config as a run does, and print all that is wrong in it.",
    "download": "Download a model from the Hugging Face Hub or Kaggle.",
}
_OF_THE_LIBRARY = ("plan", "cache")
"""Commands that need no recipes, or ask for them where they do."""
_THEIRS = {"cat": "Cat", "cp": "Copy", "download": "Download"}
"""torchtune's classes for its commands, each in a module of the command's name."""


def main() -> None:
    """The console script."""
    try:
        try:
            _run(sys.argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _end_unread()
    except AdaptiveBatchingError as error:
        print(printable(f"{PROGRAM}: {type(error).__name__}: {error}"), file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if type(error).__name__ != "ChildFailedError":  # by name, since torch may not be imported
            raise
        from torchtune_adaptive.cli.run_command import given_reason

        # Where the first rank to fail gave a reason of one line, that line says more than torchrun's report.
        reason: Any = given_reason(error)  # type: ignore[arg-type]
        print(f"\n{PROGRAM}: {reason}" if reason else error, file=sys.stderr)
        sys.exit(1)


def _end_unread() -> None:
    """End in silence where what reads the output, such as ``head``, has had enough.

    Raises:
        BrokenPipeError: it was another pipe that broke.
    """
    stdout = select.poll()
    stdout.register(1, 0)  # errors are told whatever is asked for
    if not any(event & select.POLLERR for _, event in stdout.poll(0)):
        raise
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where Python writes the rest at its end
    sys.exit(128 + signal.SIGPIPE)


def _run(argv: list[str]) -> None:
    command = argv[1] if len(argv) > 1 else ""
    if command in _HELP and command not in _OF_THE_LIBRARY:
        require_recipes(command)
    asks_for_help = bool({"-h", "--help"} & set(argv[2:]))
    if command in ("run", "find") and argv[2:] and not asks_for_help:
        from torchtune_adaptive.cli.recipe_argument import require_recipe

        require_recipe(command, argv[2:])  # before torchrun's parser, whose import takes seconds
    if command == "run":
        from torchtune_adaptive.cli.run_command import run

        return run(argv[2:])
    parser, commands = _parsers(command)
    if command in _HELP and len(argv) == 2 and command != "ls":
        commands[command].print_help(sys.stderr)
        sys.exit(2)
    if not asks_for_help:
        if command == "plan":  # options and overrides in any order, which subcommands cannot have
            from torchtune_adaptive.cli.plan_options import parsed

            arguments = parsed(commands["plan"], argv[2:])
            return arguments.func(arguments)
        if command == "find":
            return _find(argv)
    arguments = parser.parse_args(argv[1:])
    arguments.func(arguments)


def _parsers(command: str) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The program's parser, and those of its commands; only that of ``command`` has its arguments."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="torchtune's command line, plus recipes that find their own batch size.",
        epilog="`run`, `find`, `plan`, `cache` and `validate` are ours; the other commands are torchtune's. "
        "All but `cache` and `plan --trainer` need torchtune and the recipes.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.set_defaults(func=lambda _: parser.print_help())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in _HELP.items():
        if name == command and name in _THEIRS:
            _add_torchtunes(name, commands)
        else:
            added = commands.add_parser(name, help=text, description=text)
            if name == command:
                _ADD_OURS[name](added)
    return parser, dict(commands.choices)


def _add_torchtunes(name: str, commands: Any) -> None:
    """Add one of torchtune's commands, whose help shows this program's name instead of torchtune's."""
    private.torchtune_command(name, _THEIRS[name]).create(commands)
    added = commands.choices[name]
    texts = [(added, attribute) for attribute in ("prog", "usage", "description", "epilog")]
    for owner, attribute in [*texts, *((action, "help") for action in private.actions(added))]:
        if text := getattr(owner, attribute):
            setattr(owner, attribute, re.sub(r"\btune (?=[a-z])", f"{PROGRAM} ", text))


def _ls(_: argparse.Namespace) -> None:
    from torchtune_adaptive.recipe import torchtune_recipes

    print(f"{'RECIPE':<40} CONFIG")
    for recipe in torchtune_recipes():
        for number, config in enumerate(recipe.configs):
            print(f"{recipe.name if number == 0 else '':<40} {config.name}")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    from torchtune_adaptive.cli.plan_options import add_arguments

    add_arguments(parser)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["show", "clear"], help="what to do")
    parser.set_defaults(func=_cache)


def _cache(arguments: argparse.Namespace) -> None:
    base = user_cache()
    if base is None:
        raise AdaptiveBatchingError("there is no cache: this user has no home. Set XDG_CACHE_HOME")
    entries = cached_files(base)
    rows = [
        (kind.replace("_", " "), str(len(files)), human_bytes(sum(f.stat().st_size for f in files)))
        for kind, files in entries.items()
    ]
    if arguments.action == "clear":
        for path in (path for files in entries.values() for path in files):
            path.unlink(missing_ok=True)
    print(f"{'Removed from' if arguments.action == 'clear' else 'Cached in'} {base}:")
    print("\n".join(table(("", "files", "size"), rows, right={1, 2})))


def _add_find(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{PROGRAM} find [TORCHRUN-OPTIONS] <recipe> --config <config> [RECIPE-OPTIONS]"
    parser.epilog = "Takes what `run` takes. Only the overrides are printed on stdout."


def _find(argv: list[str]) -> None:
    """Run the recipe up to where it has found its batch size, and print only the overrides on stdout."""
    from torchtune_adaptive.cli.recipe_argument import config_of
    from torchtune_adaptive.cli.run_command import run
    from torchtune_adaptive.recipe import BLOCK

    cfg = config_of(argv[2:])
    fastest = bool(cfg.get(_FASTEST, False))
    report = Path(str(cfg.get("output_dir"))) / (_FOUND_FASTEST if fastest else _FOUND)
    before = _written(report)
    only = () if fastest else ("use_maximum_batch_size=True",)
    arguments = [*argv[2:], *only, f"{BLOCK}.search_only=True"]
    with _stdout_to_stderr():
        try:
            run(arguments)
        except SystemExit as end:  # of a recipe in this process
            if end.code:
                raise
    if _written(report) != before:
        print(json.loads(report.read_text())["overrides"])


def _written(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Let this process and those that it starts write to stderr what they would write to stdout."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _add_validate(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{PROGRAM} validate CONFIG [KEY=VALUE ...]"
    parser.add_argument("config", help="name or path of a config")
    parser.add_argument("overrides", nargs="*", help="what to change in it")
    parser.set_defaults(func=_validate)


def _validate(arguments: argparse.Namespace) -> None:
    from torchtune_adaptive.cli.validate_command import validate

    validate(arguments)


_ADD_OURS = {
    "ls": lambda parser: parser.set_defaults(func=_ls),
    "plan": _add_plan,
    "cache": _add_cache,
    "find": _add_find,
    "validate": _add_validate,
}
