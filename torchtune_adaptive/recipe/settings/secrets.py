"""What of a config is written to files that others see: text from the environment, where users keep secrets,
only as it is referred to, and what keys are named like secrets not at all.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

_SECRET = re.compile(r"(token|key|secret|password)$", re.IGNORECASE)
_OUTSIDE = re.compile(r"\boc\.(env|decode|create)\b")
"""OmegaConf's functions for the environment, and those that look again at what they are given."""


def shown(key: str, value: Any) -> Any:
    """The value of a key, for people; what refers to the environment is no secret."""
    is_text = isinstance(value, (str, int)) and not isinstance(value, bool)
    return "***" if _SECRET.search(key) and is_text and "${" not in str(value) else value


def shown_config(cfg: DictConfig) -> DictConfig:
    """A config for people."""
    return OmegaConf.create(_each(shown, "", _written(cfg)))


def facts_of(cfg: DictConfig) -> Any:
    """What a config says, to be compared: of text from the environment the reference and a digest."""
    return _each(_fact, "", OmegaConf.to_container(cfg, resolve=True), _written(cfg))


def is_fact_of(fact: Any, value: Any) -> bool:
    """Whether a value, which was saved before or is written in the config now, is that of a digest."""
    return isinstance(fact, str) and fact.endswith(_digest(value))


def _written(cfg: DictConfig) -> Any:
    """A config whose references are followed, but not where they lead outside."""
    return OmegaConf.to_container(
        OmegaConf.create(_each(_kept, "", OmegaConf.to_container(cfg))), resolve=True
    )


def _kept(_: str, value: Any) -> Any:
    return value.replace("${", "\\${") if _OUTSIDE.search(str(value)) else value


def _fact(_: str, value: Any, written: Any) -> Any:
    is_plain = value == written or not isinstance(value, (str, list, dict))
    return value if is_plain else f"{written} {_digest(value)}"


def _digest(value: Any) -> str:
    return f"(sha256 {hashlib.sha256(str(value).encode()).hexdigest()[:12]})"


def _each(change: Callable[..., Any], key: str, *values: Any) -> Any:
    """A config with ``change`` of all values, or of each with that in a config of the same keys."""
    first = values[0]
    if all(isinstance(one, dict) for one in values):
        return {name: _each(change, str(name), *(one[name] for one in values)) for name in first}
    if all(isinstance(one, list) for one in values):
        return [_each(change, key, *each) for each in zip(*values, strict=True)]
    return change(key, *values)
