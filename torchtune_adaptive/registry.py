"""Our recipes and configs, and torchtune's: their names and their files."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torchtune
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune._recipe_registry import Config, Recipe, get_all_recipes
from torchtune.config._utils import _get_component_from_path

from torchtune_adaptive import tiny
from torchtune_adaptive.errors import ConfigError

_PACKAGE = Path(__file__).parent

# In a wheel the configs lie in the package; in a checkout, beside it.
CONFIGS = next(
    path for path in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if path.is_dir()
)
_TORCHTUNE_CONFIGS = Path(torchtune.__file__).parent.parent / "recipes" / "configs"

RECIPES = {
    "adaptive_full_finetune_distributed": "full",
    "adaptive_lora_finetune_distributed": "lora",
}
"""Our recipes, each with the word that the names of its configs contain."""

# ${tiny_assets:} in the tiny configs: made on first use.
_register_resolver = (
    getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
)
_register_resolver("tiny_assets", lambda: str(tiny.assets()), replace=True)


def adaptive_recipe(name: str) -> str | None:
    """Our recipe that does what one of torchtune's does; None if there is none."""
    return next(
        (ours for ours, kind in RECIPES.items() if name.startswith(f"{kind}_finetune")), None
    )


def our_configs() -> list[str]:
    """The names of our configs, e.g. ``llama3_2/1B_adaptive_full``."""
    return sorted(
        path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml")
    )


def torchtune_configs() -> dict[str, Path]:
    """torchtune's configs for full and LoRA finetuning, by name."""
    return {
        config.name: _TORCHTUNE_CONFIGS / config.file_path
        for recipe in get_all_recipes()
        if recipe.name.startswith(("full_finetune", "lora_finetune"))
        for config in recipe.configs
    }


def find_config(name: str) -> Path:
    """The file of a config, given its name or its path.

    Raises:
        ConfigError: there is no such config; the message names the nearest ones.
    """
    theirs = torchtune_configs()
    for path in (Path(name), CONFIGS / f"{name}.yaml", theirs.get(name)):
        if path is not None and path.is_file():
            return path
    close = get_close_matches(name, [*our_configs(), *theirs], n=3)
    raise ConfigError(
        "--config",
        name,
        "is neither a file nor the name of a config",
        f"Did you mean {' or '.join(close)}?"
        if close
        else f"Ours are {', '.join(our_configs())}; `tune ls` lists torchtune's",
    )


def load_config(name: str) -> DictConfig:
    """A config, given its name or its path, as it is written.

    Raises:
        ConfigError: there is no such config, or the file is not a block of YAML.
    """
    path = find_config(name)
    try:
        cfg = OmegaConf.load(path)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            "--config", str(path), f"cannot be read: {reason}", "Correct the file"
        ) from error
    if not isinstance(cfg, DictConfig):
        raise ConfigError("--config", str(path), "is not a block", "Write `key: value` lines in it")
    return cfg


def register() -> None:
    """Put our recipes and configs into torchtune's registry, for this process."""
    recipes = get_all_recipes()  # the registry itself, which is a list
    known = {recipe.name for recipe in recipes}
    for name, word in RECIPES.items():
        spec = importlib.util.find_spec(name)
        if name in known or spec is None or spec.origin is None:
            continue
        # torchtune joins these paths to its own folder, which an absolute one overrides.
        configs = [
            Config(name=config, file_path=str(CONFIGS / f"{config}.yaml"))
            for config in our_configs()
            if word in config.replace("/", "_").split("_")
        ]
        recipes.append(Recipe(name, spec.origin, configs, supports_distributed=True))


def component(path: str) -> Callable[..., Any]:
    """A function by its dotted path; modules in the working directory count, after those installed."""
    with suppress(FileNotFoundError):  # the working directory was deleted
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)
    return _get_component_from_path(path)
