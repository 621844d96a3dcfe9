"""The arguments of ``run`` and ``find``: the recipe, and the config with its overrides.

Looked at before anything is started, and without torchrun's parser, which takes seconds to import.
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

from omegaconf import DictConfig

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.recipe import (
    BLOCK,
    RECIPES,
    find_config,
    is_module,
    is_recipe,
    kind_of,
    load_config,
    nearest_recipe,
    our_recipe_for,
    with_overrides,
)

_ASKING_FOR_OURS = (
    *("use_maximum_batch_size", "use_fastest_configuration", "batch_increase_function", BLOCK),
)
"""Keys that torchtune's recipes ignore in silence. Its main branch has the others, too."""


def require_recipe(command: str, arguments: list[str]) -> None:
    """Stop where the recipe is missing, unknown, or one that would ignore what is asked for.

    Raises:
        ConfigError: with the recipe that was probably meant.
    """
    if arguments[-1:] == ["--config"]:
        raise ConfigError(command, "--config", "has no value", "Give a config name or a YAML file")
    before_config = takewhile(lambda one: one.partition("=")[0] != "--config", arguments)
    words = [word for word in before_config if not word.startswith(("-", "~")) and "=" not in word]
    # Before the recipe, there may be options of torchrun with their values.
    recipe = next((word for word in words if is_recipe(word)), words[-1] if words else "")
    if recipe in RECIPES or (recipe.endswith(".py") and Path(recipe).is_file()):
        if recipe in RECIPES and (given := _option(arguments)):
            find_config(given)  # the recipe says so as well, once it has imported torch
        return
    if is_recipe(recipe) and not recipe.endswith(".py"):
        _require_nothing_of_ours(command, recipe, arguments)
    elif (config := _config_named(recipe, arguments)) is not None:
        reason = "is a config, and the recipe is missing" if recipe else "names no recipe"
        suited = f"tune-adaptive {command} {kind_of(load_config(config)).recipe} --config {config}"
        raise ConfigError(command, recipe or f"--config {config}", reason, f"Use `{suited}`")
    elif recipe and not is_module(recipe):
        meant = nearest_recipe(recipe)
        reason = "is neither the name of a recipe nor a file with one"
        remedy = f"Did you mean {meant}?" if meant else f"Ours are {', '.join(RECIPES)}"
        raise ConfigError("recipe", recipe, reason, remedy)


def config_of(arguments: list[str]) -> DictConfig:
    """The config of a run with these arguments."""
    name = _option(arguments)
    if not name:
        raise ConfigError("--config", None, "is missing", "Give a config name or a YAML file")
    overrides = [
        argument
        for argument in arguments
        if not argument.startswith("-") and ("=" in argument or argument.startswith("~"))
    ]
    return with_overrides(load_config(name), overrides)


def _option(arguments: list[str]) -> str:
    for number, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        if option == "--config":
            return value or next(iter(arguments[number + 1 : number + 2]), "")
    return ""


def _config_named(recipe: str, arguments: list[str]) -> str | None:
    """The config that stands where the recipe should, or beside where it should."""
    name = recipe or _option(arguments)
    try:
        find_config(name)
    except ConfigError:
        return None
    return name


def _require_nothing_of_ours(command: str, recipe: str, arguments: list[str]) -> None:
    """Refuse one of torchtune's recipes where it would ignore what was asked for, and train."""
    ours = our_recipe_for(recipe)
    instead = f"Use {ours}" if ours else f"Use one of {', '.join(RECIPES)}, or a file with your own"
    if command == "find":
        raise ConfigError("recipe", recipe, "does not search for a batch size", instead)
    if not _option(arguments):
        return  # torchtune's parser says so
    cfg = config_of(arguments)
    for key in _ASKING_FOR_OURS:
        if cfg.get(key):
            value = "..." if key == BLOCK else cfg[key]
            instead = f"Use {ours}" if ours else f"Remove {key}"
            raise ConfigError(key, value, f"changes nothing in torchtune's {recipe}", instead)
