"""``tune-adaptive``: torchtune's command line with our recipes and configs, and two more commands."""

from __future__ import annotations

import argparse
import sys

from torchtune_adaptive.errors import AdaptiveBatchingError, ConfigError
from torchtune_adaptive.plan.workers import start_server
from torchtune_adaptive.settings.adaptive import BLOCK
from torchtune_adaptive.settings.checks import check
from torchtune_adaptive.settings.kinds import kind_of
from torchtune_adaptive.versions import require_supported_versions

_FIND = ("use_maximum_batch_size=True", f"{BLOCK}.search_only=True")
_FIND_HELP = "Find the largest micro-batch that fits, and print the overrides that use it."


def main() -> None:
    """The console script."""
    require_supported_versions()  # before torchtune is imported, which fails less clearly
    try:
        _run(sys.argv)
    except AdaptiveBatchingError as error:
        print(f"tune-adaptive: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


def _run(argv: list[str]) -> None:
    command = argv[1] if len(argv) > 1 else ""
    if command == "plan":
        start_server()  # imports torch while this process does

    from torchtune._cli import cat, cp, download, ls, run, validate

    from torchtune_adaptive.plan import command as plan_command
    from torchtune_adaptive.registry import find_config, register

    register()
    if command == "find" and len(argv) > 2 and not {"-h", "--help"} & set(argv):
        _require_recipe_that_searches(argv[2:])
        # torchtune tells launched from single runs by counting sys.argv, so that is what is rewritten.
        argv[1:2] = ["run"]
        argv += _FIND
    elif command == "validate" and len(argv) == 3:
        _validate_ours(argv[2])
        argv[2] = str(find_config(argv[2]))

    parser = argparse.ArgumentParser(
        prog="tune-adaptive",
        description="torchtune's command line, plus recipes that find their own batch size.",
        epilog="`find` and `plan` are ours; the other commands are torchtune's.",
    )
    parser.set_defaults(func=lambda _: parser.print_help())
    commands = parser.add_subparsers(title="subcommands")
    for torchtunes in (download.Download, ls.List, cp.Copy, run.Run, validate.Validate, cat.Cat):
        torchtunes.create(commands)
    commands.add_parser(
        "find",
        help=_FIND_HELP,
        description=f"{_FIND_HELP} Takes what `run` takes.",
        usage="tune-adaptive find [TORCHRUN-OPTIONS] <recipe> --config <config> [RECIPE-OPTIONS]",
    )
    plan_command.add_arguments(
        commands.add_parser("plan", help=plan_command.HELP, description=plan_command.HELP)
    )
    arguments = parser.parse_args(argv[1:])
    arguments.func(arguments)


def _require_recipe_that_searches(arguments: list[str]) -> None:
    """Refuse torchtune's recipes, which would ignore what asks for a search, and train."""
    from torchtune_adaptive.registry import RECIPES, adaptive_recipe

    if any(argument in RECIPES or argument.endswith(".py") for argument in arguments):
        return
    recipe = arguments[arguments.index("--config") - 1] if "--config" in arguments[1:] else None
    ours = recipe and adaptive_recipe(recipe)
    raise ConfigError(
        "recipe",
        recipe,
        "does not search for a batch size",
        f"Use {ours}" if ours else f"Use one of {', '.join(RECIPES)}, or a file with your own",
    )


def _validate_ours(name: str) -> None:
    """Check a config as a run does; torchtune checks the components."""
    from torchtune_adaptive.registry import load_config
    from torchtune_adaptive.train.growth import batch_increase

    cfg = load_config(name)
    batch_increase(cfg, check(cfg, kind_of(cfg)))
