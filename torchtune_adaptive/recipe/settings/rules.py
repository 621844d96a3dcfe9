"""What a setting may be: how messages describe it, and how a value is read.

The annotation of a setting says what it takes, and ``rule_of`` derives its rule from that: ``bool``,
``Literal["a", "b"]``, ``Annotated[int, at_least(1)]``, and unions of these.
"""

from __future__ import annotations

import collections.abc
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from torchtune_adaptive.common import AMOUNT_OF_MEMORY, ConfigError, parse_memory
from torchtune_adaptive.core import knobs


@dataclass(frozen=True)
class Rule:
    """What a value must be."""

    expected: tuple[str, ...]
    """The possibilities, for messages: ``("True", "False")``, ``("an integer >= 1",)``."""
    parse: Callable[[object], Any]
    """A function that gives the value as the program uses it, or raises ``ValueError``."""

    def read(self, key: str, value: object) -> Any:
        """The value of a key; raises ``ConfigError`` where it is none of the possibilities."""
        try:
            return self.parse(value)
        except ValueError:
            one_of = "one of: " if len(self.expected) > 1 else ""
            remedy = f"Must be {one_of}{', '.join(self.expected)}"
            raise ConfigError(key, value, "is not valid", remedy) from None


def rule_of(annotation: Any) -> Rule:
    """The rule of a type. ``None`` is no possibility: in a config ``null`` means the default."""
    arguments = get_args(annotation)
    if annotation is bool:
        return BOOLEAN
    if get_origin(annotation) is Annotated:
        return next(one for one in arguments[1:] if isinstance(one, Rule))
    if get_origin(annotation) is Literal:
        return one_of(*arguments)
    if get_origin(annotation) in (Union, UnionType):
        return either(*(rule_of(one) for one in arguments if one is not NoneType))
    raise TypeError(f"no rule for {annotation}")


def rule_of_argument(annotation: Any) -> Rule | None:
    """The rule of a type that the argument of a foreign component has; None where it does not say what a
    config may have there. Types that no config can have, such as tensors, are no possibility."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return one_of(*arguments)
    if origin in (Union, UnionType):
        known = [rule for one in arguments if (rule := rule_of_argument(one)) is not None]
        return either(*known) if known and known != [NULL] else None
    if origin in (list, tuple, collections.abc.Sequence):
        items = rule_of_argument(arguments[0]) if arguments else None
        return _list_of(items)
    try:
        return _OF_TYPES.get(origin or annotation)
    except TypeError:  # not hashable
        return None


def _list_of(items: Rule | None) -> Rule:
    def parse(value: object) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise ValueError
        return [items.parse(one) if items else one for one in value]

    each = f", each of them {' or '.join(items.expected)}" if items else ""
    return Rule((f"a list{each}",), parse)


def either(*rules: Rule) -> Rule:
    """What any of the rules takes; the first one that does reads it."""

    def parse(value: object) -> Any:
        for rule in rules:
            try:
                return rule.parse(value)
            except ValueError:
                pass
        raise ValueError

    return Rule(tuple(text for rule in rules for text in rule.expected), parse)


def one_of(*choices: str | int) -> Rule:
    def parse(value: object) -> str | int:
        if value is False and "off" in choices:  # YAML reads a bare ``off`` as False
            return "off"
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value in choices:
            return value
        raise ValueError

    return Rule(tuple(map(str, choices)), parse)


def at_least(minimum: int, at_most: int | None = None) -> Rule:
    """An integer."""

    def parse(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError
        if at_most is not None and value > at_most:
            raise ValueError
        return value

    limits = f">= {minimum}" if at_most is None else f"from {minimum} to {at_most}"
    return Rule((f"an integer {limits}",), parse)


def number(expected: str, valid: Callable[[float], bool]) -> Rule:
    """A number, whether or not it is written with a fraction."""

    def parse(value: object) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            with suppress(OverflowError):  # an integer that no float holds
                if valid(value):
                    return float(value)
        raise ValueError

    return Rule((expected,), parse)


def _if(valid: Callable[[Any], object]) -> Callable[[object], Any]:
    """Takes what is valid as it is."""

    def parse(value: object) -> Any:
        if not valid(value):
            raise ValueError
        return value

    return parse


def _matches(pattern: str) -> Callable[[object], Any]:
    return _if(lambda value: isinstance(value, str) and re.fullmatch(pattern, value))


def _parse_never(value: object) -> None:
    if value != "never":
        raise ValueError


def _are_texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)


def _parse_keys(value: Any) -> tuple[str, ...]:
    if value and _are_texts(value):
        return tuple(value)
    raise ValueError


def _parse_checkpointing(value: Any) -> str:
    text = _CHECKPOINTING(value)
    if (first := knobs.layers_of(text)) and first[0] >= first[1]:
        raise ValueError
    return text


_CHECKPOINTING = _matches(
    r"all|none|operations|every_([2-9]|[1-9]\d{1,3})|[1-9]\d{0,3}_of_[1-9]\d{0,3}"
)
_PATH_OF_CODE = _matches(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
NEVER = Rule(("never",), _parse_never)
BOOLEAN = Rule(("True", "False"), _if(lambda value: isinstance(value, bool)))
MEMORY = Rule((AMOUNT_OF_MEMORY,), parse_memory)
_IS_TEXT = _if(lambda value: isinstance(value, str) and value.strip())
TEXT = Rule(("a text that is not empty",), _IS_TEXT)
FOLDER = Rule(("the path of a folder",), _IS_TEXT)
FILE = Rule(("the path of a file",), _IS_TEXT)
CHECKPOINTING = Rule(
    ("all", "none", "operations", "K_of_N layers, e.g. 12_of_32", "every_N, e.g. every_2"),
    _parse_checkpointing,
)
KEYS = Rule(("a list of keys",), _parse_keys)
FUNCTION = Rule(("the dotted path of a function (package.module.function)",), _PATH_OF_CODE)
COMPONENT = Rule(
    ("a block whose _component_ is a dotted path",),
    _if(lambda value: isinstance(value, Mapping) and _PATH_OF_CODE(value.get("_component_"))),
)
LAYERS = Rule(("a list of layer names",), _if(_are_texts))
IDS = Rule(("a list of numbers of tokens",), _list_of(at_least(0)).parse)
REWARDS = Rule(
    ("a list of rewards: dotted paths of functions, and blocks whose _component_ is one",),
    _list_of(either(FUNCTION, COMPONENT)).parse,
)
SHARE = number("at least 0 and less than 1, e.g. 0.05", lambda value: 0 <= value < 1)
PATIENCE = number("a number of seconds from 0 to 3600", lambda n: 0 <= n <= 3600)
SECONDS = number("a number of seconds from 1 to 86400, e.g. 45", lambda value: 1 <= value <= 86400)
POSITIVE = number("a number greater than 0", lambda value: value > 0)
RATIO = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
FINITE = number("a number >= 0", lambda value: 0 <= value <= 1e300)
ANY_NUMBER = number("a number", math.isfinite)
SCALE = number("a number greater than 0", lambda value: 0 < value <= 1e300)
BLOCK_OF_KEYS = Rule(("a block of keys",), _if(lambda value: isinstance(value, Mapping)))
NULL = Rule(("null",), _if(lambda value: value is None))
FILES = Rule(
    ("a list of names of files", "a block with filename_format and max_filename"),
    _if(lambda value: value and (isinstance(value, Mapping) or _are_texts(value))),
)
_OF_TYPES: dict[Any, Rule] = {
    NoneType: NULL,
    bool: BOOLEAN,
    int: number("an integer", lambda value: math.isfinite(value) and value == int(value)),
    float: number("a number", lambda value: True),
    str: Rule(
        ("a text",),
        _if(lambda value: isinstance(value, (str, int, float)) and not isinstance(value, bool)),
    ),
    list: _list_of(None),
    dict: BLOCK_OF_KEYS,
    collections.abc.Mapping: BLOCK_OF_KEYS,
}
"""What a config may have where a component's argument is of a type; a number is taken as a text."""
