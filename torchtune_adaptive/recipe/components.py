"""The components of a config: whether they take what they are given, and how they are made.

A component names its arguments, and those of torch and torchtune their types. So a misspelled argument or a
text in place of a number is found before anything is built. What a component itself refuses when it is made
is told in one line as well.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config
from torchtune.training.checkpointing import ModelType

from torchtune_adaptive.common import AdaptiveBatchingError, ConfigError
from torchtune_adaptive.recipe.registry import component
from torchtune_adaptive.recipe.settings.adaptive import close_match
from torchtune_adaptive.recipe.settings.checks import missing_torchvision
from torchtune_adaptive.recipe.settings.keys import VALUE_CHECKPOINTER
from torchtune_adaptive.recipe.settings.kind_table import Kind
from torchtune_adaptive.recipe.settings.mistakes import FIRST, Each
from torchtune_adaptive.recipe.settings.rules import Rule, rule_of_argument
from torchtune_adaptive.recipe.settings.torchtune_keys import blocks
from torchtune_adaptive.recipe.upstream import component_path

_GIVEN: dict[str, tuple[int, tuple[str, ...]]] = {
    # What the recipe itself gives to a component: so many arguments by position, and these by name.
    "optimizer": (1, ()),
    "dataset": (1, ()),
    "dataset_val": (1, ()),
    "lr_scheduler": (1, ("num_training_steps", "last_epoch")),
}
_OF_REWARD_FUNCTIONS = 3
"""Arguments that the recipe gives to a reward function."""
_READ_BY_US = ("recipe_checkpoint", "adapter_checkpoint")
"""Arguments of checkpointers that the recipe reads itself. On torchtune's main branch their type leaves out
the null that configs have."""
_OURS = ("batch_increase_function",)  # made elsewhere, as soon as the config is read
_WRONG_PATH = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_REFUSED = (401, 403, 404)
"""What servers answer, each time, to who may not see what there is, or asks for what is not."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_WITH_HONEST_TYPES = ("torch", "torchao", "torchtune")


def check_components(
    cfg: DictConfig, kind: Kind, each: Each = FIRST, wrong: Collection[str] = ()
) -> None:
    """Raise ``ConfigError``, within ``each``, for a component that does not exist, or that does not take what
    the config gives it. The config has passed ``settings.checks.read``, except for the keys that are
    ``wrong``."""
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    right = [key for key in values if key not in wrong]
    for key in right:
        for name, block in blocks(values, key) if key in kind.keys and key not in _OURS else ():
            if name in wrong:
                continue
            if isinstance(block, Mapping) and "_component_" in block:
                _check(key, name, block, each)
            elif key == "reward_functions":
                with each:
                    _find(name, block)
    if "collate_fn" in right and (collate := values["collate_fn"]) is not None:
        with each:
            _find("collate_fn", collate)
    for key in ("checkpointer", VALUE_CHECKPOINTER, *(one.checkpointer for one in kind.frozen)):
        if key in kind.keys and key in right:
            with each:
                _check_model_type(key, values[key])


def make(block: DictConfig, name: str, *given: Any, **more: Any) -> Any:
    """What a component makes, as torchtune would have it.

    Args:
        block: the component's, in the config that it refers to.
        name: the key of the block, for messages.
        given: arguments of the recipe's own.
        more: the same, by name.

    Raises:
        ConfigError: the component refuses an argument. What goes wrong in a component of the user's own is
            left to its traceback, unless a file is missing.
    """
    if (path := component_path(block._component_)) != block._component_:
        more["_component_"] = path
    try:
        return config.instantiate(block, *given, **more)
    except (AdaptiveBatchingError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not is_of_a_library(block) and not isinstance(error, OSError):
            raise
        refused = refusal(block, name, error, len(given))
        if _may_pass(error):
            refused.repeats = refused.everywhere = False
        raise refused from error


def _may_pass(error: BaseException | None) -> bool:
    """Whether an error comes from a network or a disk that may be back. Libraries raise others for it: where
    the Hub does not answer, ``datasets`` finds no file."""
    while error is not None:
        refused = getattr(getattr(error, "response", None), "status_code", None) in _REFUSED
        if isinstance(error, OSError) and not isinstance(error, _WRONG_PATH) and not refused:
            return True
        error = error.__cause__ or error.__context__
    return False


def is_of_a_library(block: DictConfig) -> bool:
    """Whether a component is one of torch's or torchtune's."""
    return str(block._component_).partition(".")[0] in _WITH_HONEST_TYPES


def refusal(block: DictConfig, name: str, error: Exception, by_position: int = 0) -> ConfigError:
    """The error of one line for what a component says against one of its arguments.

    Args:
        by_position: the number of arguments that the recipe itself gives.
    """
    values: Any = OmegaConf.to_container(block, resolve=True)
    path = values.pop("_component_")
    text = " ".join(str(error).split()).rstrip(". ")
    unknown = re.search(r"unexpected keyword argument '(\w+)'", text)
    if unknown and unknown[1] in values:
        known = _names(_parameters(component(path))[by_position:])
        return _unknown_argument(name, path, unknown[1], values[unknown[1]], known)
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    # The argument that it speaks of, if it quotes one.
    quoted = {key: v for key, v in values.items() if isinstance(v, str) and v and v in text}
    if not quoted:
        named = [key for key in values if re.search(rf"\b{key}\b", text)]
        remedy = f"Look at {', '.join(f'{name}.{key}' for key in named) or f'the keys of {name}'}"
        return ConfigError(name, path, f"cannot be made: {said}", remedy)
    key = max(quoted, key=lambda one: len(quoted[one]))
    return ConfigError(
        f"{name}.{key}", quoted[key], f"cannot be used: {said}", f"Correct {name}.{key}"
    )


# --- before anything is built ---------------------------------------------------------------------


def _check(key: str, name: str, block: Mapping[str, Any], each: Each) -> None:
    path = block["_component_"]
    with each:
        _check_arguments(key, name, block, _find(f"{name}._component_", path), each)


def _check_arguments(
    key: str, name: str, block: Mapping[str, Any], found: Callable[..., Any], each: Each
) -> None:
    path = block["_component_"]
    by_position, by_name = _GIVEN.get(key, (0, ()))
    if key == "reward_functions" and not inspect.isclass(found):
        by_position = _OF_REWARD_FUNCTIONS
    parameters = _parameters(found)[by_position:]
    given = {argument: value for argument, value in block.items() if argument != "_component_"}
    names = _names(parameters)
    if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters):
        for argument, value in given.items():
            with each:
                if argument not in names:
                    raise _unknown_argument(name, path, argument, value, names)
    for one in parameters:
        needed = one.kind in _BY_NAME and one.default is one.empty
        with each:
            if needed and one.name not in given and one.name not in by_name:
                raise ConfigError(
                    f"{name}.{one.name}", None, f"is missing, and {path} needs it", "Set it"
                )
    rules = _rules(found) if path.partition(".")[0] in _WITH_HONEST_TYPES else {}
    optional = {one.name for one in parameters if one.default is None}.union(_READ_BY_US)
    for argument, value in given.items():
        with each:
            if argument in rules and not (value is None and argument in optional):
                rules[argument].read(f"{name}.{argument}", value)


def _parameters(found: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):  # in native code, which does not say
        return [inspect.Parameter("more", inspect.Parameter.VAR_KEYWORD)]


def _names(parameters: Iterable[inspect.Parameter]) -> list[str]:
    return [each.name for each in parameters if each.kind in _BY_NAME]


def _rules(found: Callable[..., Any]) -> dict[str, Rule]:
    """What the arguments of a component may be, as far as their types say."""
    try:
        hints = typing.get_type_hints(found.__init__ if inspect.isclass(found) else found)
    except (AttributeError, NameError, TypeError):
        return {}
    rules = {name: rule_of_argument(hint) for name, hint in hints.items()}
    return {name: rule for name, rule in rules.items() if rule is not None}


def _find(key: str, path: str) -> Callable[..., Any]:
    """The component at a path; a ``ConfigError`` if there is none."""
    try:
        return component(component_path(path))
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, SyntaxError):
            raise
        if "torchvision" in str(cause):
            raise missing_torchvision(key, path, cause) from error
        package, _, _ = path.partition(".")
        if find_spec(package) is None:
            raise ConfigError(
                key,
                path,
                f"cannot be found: {package} is not installed",
                "Install it, or correct the path",
            ) from error
        reason = " ".join(str(cause).split()).rstrip(". ")
        meant = _nearest_path(path)
        remedy = f"Did you mean {meant}?" if meant else "Correct the path"
        raise ConfigError(key, path, f"cannot be found: {reason}", remedy) from error


def _nearest_path(path: str) -> str | None:
    module, _, name = path.rpartition(".")
    try:
        known = {each.lower(): each for each in dir(import_module(module)) if each[0] != "_"}
    except ImportError:
        return None
    meant = close_match(name, known)
    return f"{module}.{known[meant]}" if meant else None


def _unknown_argument(
    name: str, path: str, argument: str, value: object, known: list[str]
) -> ConfigError:
    initials = "".join(word[0] for word in argument.split("_") if word)
    meant = close_match(argument, known) or (initials if initials in known else None)
    remedy = (
        f"Did you mean {name}.{meant}?" if meant else f"It takes {', '.join(known) or 'nothing'}"
    )
    return ConfigError(f"{name}.{argument}", value, f"is no argument of {path}", remedy)


def _check_model_type(key: str, block: Mapping[str, Any]) -> None:
    model_type = block.get("model_type")
    if model_type is None or model_type in ModelType.__members__:
        return
    meant = close_match(str(model_type).upper(), ModelType.__members__)
    known = (
        f"Did you mean {meant}?" if meant else f"Must be one of: {', '.join(ModelType.__members__)}"
    )
    raise ConfigError(f"{key}.model_type", model_type, "is not valid", known)
