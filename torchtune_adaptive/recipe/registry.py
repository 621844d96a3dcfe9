"""Our recipes and configs, and torchtune's: their names and their files.

Importing this does not import torch: commands that only look things up are quick.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_adaptive.common import ConfigError, require_bounded
from torchtune_adaptive.recipe.install import install
from torchtune_adaptive.recipe.private import component_at, recipe_registry
from torchtune_adaptive.recipe.settings.kind_table import KINDS

_PACKAGE = Path(__file__).parents[1]

# In a wheel the configs lie in the package; in a checkout, beside it.
CONFIGS = next(
    path for path in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if path.is_dir()
)

RECIPES = {kind.recipe: kind.name for kind in KINDS.values()}
"""Our recipes, each with the name of its kind, which the names of its configs contain."""


def _torchtune_folder() -> Path:
    spec = importlib.util.find_spec("torchtune")
    assert spec is not None and spec.origin is not None, "versions.py has checked that it is there"
    return Path(spec.origin).parent


def torchtune_recipes() -> list[Any]:
    """torchtune's registry: the list itself, with the recipes that were added to it."""
    recipes: list[Any] = recipe_registry(_torchtune_folder()).get_all_recipes()
    return recipes


def is_recipe(name: str) -> bool:
    """Whether this is a recipe's name, or a file with one."""
    return name in RECIPES or name in _their_recipes() or name.endswith(".py")


def _their_recipes() -> set[str]:
    return {recipe.name for recipe in torchtune_recipes()} - set(RECIPES)


def file_of_recipe(name: str) -> str | None:
    """The file of a recipe, ours or torchtune's, by its name; None for any other."""
    recipe = _named(name)
    # The path of one of ours is absolute, which overrides the folder.
    return str(_torchtune_folder().parent / "recipes" / recipe.file_path) if recipe else None


def runs_on_ranks(name: str) -> bool:
    """Whether a recipe may be started on several ranks; one of the user's own may."""
    recipe = _named(name)
    return recipe is None or recipe.supports_distributed


def _named(name: str) -> Any:
    return next((recipe for recipe in torchtune_recipes() if recipe.name == name), None)


def is_module(name: str) -> bool:
    """Whether this is a module, as one of the user's own recipes may be, also in the working directory."""
    _add_working_directory()
    with suppress(ImportError, ValueError):
        return importlib.util.find_spec(name.replace("/", ".")) is not None
    return False


def nearest_recipe(name: str) -> str | None:
    """The recipe that a wrong name was probably meant to be; ours before torchtune's."""
    begins = [recipe for recipe in RECIPES if recipe.startswith(name)]
    close = get_close_matches(name, RECIPES, n=1) or get_close_matches(name, _their_recipes(), n=1)
    return next(iter([*begins, *close]), None)


def our_recipe_for(name: str) -> str | None:
    """Our recipe that does what one of torchtune's does; None if there is none."""
    name = name.removeprefix("dev/")
    possible = (name.replace("_single_device", instead) for instead in ("", "_distributed"))
    return next((f"adaptive_{one}" for one in possible if f"adaptive_{one}" in RECIPES), None)


def our_configs() -> list[str]:
    """The names of our configs, e.g. ``llama3_2/1B_adaptive_full``."""
    return sorted(
        path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml")
    )


def torchtune_configs() -> dict[str, Path]:
    """All configs of torchtune, by name."""
    folder = _torchtune_folder().parent / "recipes" / "configs"
    files = {
        config.name: folder / config.file_path
        for recipe in torchtune_recipes()
        if recipe.name not in RECIPES
        for config in recipe.configs
    }
    return {name: path for name, path in files.items() if path.is_file()}  # one is not shipped


def find_config(name: str) -> Path:
    """The file of a config, given its name or its path; from now on, what it refers to can be resolved.

    Raises:
        ConfigError: there is no such config; the message names the nearest ones.
    """
    install()
    theirs = torchtune_configs()
    for path in (Path(name), CONFIGS / f"{name}.yaml", theirs.get(name)):
        if path is not None and path.is_file():
            return path
    close = _meant(name)
    raise ConfigError(
        "--config",
        name,
        "is neither a file nor the name of a config",
        f"Did you mean {' or '.join(close)}?"
        if close
        else f"Ours are {', '.join(our_configs())}; `tune ls` lists torchtune's",
    )


def name_of_config(path: Path) -> str | None:
    """The name of a config of ours or of torchtune's, given its file; None for any other file."""
    if path.is_relative_to(CONFIGS):
        return path.relative_to(CONFIGS).with_suffix("").as_posix()
    return next((name for name, file in torchtune_configs().items() if file == path), None)


def _meant(name: str) -> list[str]:
    """The configs that a wrong name was probably meant to be; of a model's name, those of the model."""
    if not is_config_name(name) and (of_model := configs_of_model(name)):
        return of_model
    known = [*our_configs(), *torchtune_configs()]
    begins = [config for config in known if config.startswith(name)]
    return [*dict.fromkeys((*begins, *get_close_matches(name, known, n=3)))][:3]


def configs_of_model(name: str) -> list[str]:
    """torchtune's configs that finetune a model, by its name on the Hub: ``meta-llama/Llama-3.1-8B``."""
    words = _words(name.rpartition("/")[2].removeprefix("Meta-"))
    found = []
    for config in torchtune_configs():
        parts = re.fullmatch(r"(.+)_(full|q?lora)(_single_device)?", config)
        if parts and (model := _words(parts[1])) == words[: len(model)]:
            found.append(config)
    return found


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", name.lower())


def is_config_name(name: str) -> bool:
    """Whether a name begins as those of configs do, although there may be no such config."""
    folders = {known.partition("/")[0] for known in (*our_configs(), *torchtune_configs())}
    return name.partition("/")[0] in folders


def load_config(name: str) -> DictConfig:
    """A config, given its name or its path, as it is written.

    Raises:
        ConfigError: there is no such config, or the file is not a block of YAML.
    """
    path = find_config(name)
    try:
        require_bounded(path.read_text())
        cfg = OmegaConf.load(path)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            "--config", str(path), f"cannot be read: {reason}", "Correct the file"
        ) from error
    if not isinstance(cfg, DictConfig):
        raise ConfigError("--config", str(path), "is not a block", "Write `key: value` lines in it")
    return cfg


def with_overrides(cfg: DictConfig, overrides: Iterable[str]) -> DictConfig:
    """A config with what the command line changes, as torchtune understands it.

    ``~key`` removes a key, ``optimizer=X`` is short for ``optimizer._component_=X``, and ``None`` is null.

    Raises:
        ConfigError: an override makes no sense.
    """
    for override in overrides:
        plain: Any = OmegaConf.to_container(cfg)
        if override.startswith("~"):
            _remove(plain, override)
            cfg = OmegaConf.create(plain)
            continue
        key, equals, value = override.partition("=")
        if not key or not equals:
            raise ConfigError("KEY=VALUE", override, "is not an override", "Write key=value")
        block = plain.get(key)
        path = f"{key}._component_" if isinstance(block, dict) and "_component_" in block else key
        change = f"{path}={'null' if value == 'None' else value}"
        try:
            merged = OmegaConf.merge(cfg, OmegaConf.from_dotlist([change]))
        except (yaml.YAMLError, OmegaConfBaseException, TypeError) as error:
            raise _not_set(key, value, error) from error
        assert isinstance(merged, DictConfig)
        cfg = merged
    return cfg


def _not_set(key: str, value: str, error: Exception) -> ConfigError:
    remedy = "Give a block in place of a block, and a list in place of a list"
    if isinstance(error, yaml.YAMLError):
        remedy = "Quote the value, in the shell as well"
    reason = str(error).splitlines()[0].rstrip(".")
    return ConfigError(key, value, f"cannot be set ({reason})", remedy)


def _remove(config: dict[str, Any], override: str) -> None:
    *blocks, key = override[1:].split(".")
    node: Any = config
    for block in blocks:
        node = node.get(block) if isinstance(node, dict) else None
    if not isinstance(node, dict) or key not in node:
        raise ConfigError(
            "~KEY", override, "removes what the config does not have", "Check the key"
        )
    if isinstance(node[key], dict) and "_component_" in node[key]:
        raise ConfigError(
            "~KEY",
            override,
            "removes a component, which torchtune does not allow",
            "Edit the config",
        )
    del node[key]


def register() -> None:
    """Put our recipes and configs into torchtune's registry, for this process."""
    recipes = torchtune_recipes()
    entry = sys.modules[type(recipes[0]).__module__]
    known = {recipe.name for recipe in recipes}
    for name, kind in RECIPES.items():
        spec = importlib.util.find_spec(name)
        if name in known or spec is None or spec.origin is None:
            continue
        # torchtune joins these paths to its own folder, which an absolute one overrides.
        configs = [
            entry.Config(name=config, file_path=str(CONFIGS / f"{config}.yaml"))
            for config in our_configs()
            if _kind_in(config) == kind
        ]
        recipes.append(entry.Recipe(name, spec.origin, configs, supports_distributed=True))


def _kind_in(name: str) -> str | None:
    """The kind in the name of a config of ours; the longest, as ``full_dpo`` contains ``full``."""
    words = f"_{name.replace('/', '_')}_".replace("_qlora_", "_lora_")  # of the same recipe
    return max((kind for kind in KINDS if f"_{kind}_" in words), key=len, default=None)


def component(path: str) -> Callable[..., Any]:
    """A function by its dotted path; modules in the working directory count, after those installed."""
    _add_working_directory()
    return component_at(path)


def _add_working_directory() -> None:
    with suppress(FileNotFoundError):  # it was deleted
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)
