"""What a forward pass changes on the host: attributes of a trainer, such as metrics."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from functools import reduce
from types import FunctionType
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.integrations.equality import equal

_PLAIN = (int, float, str, bytes, type(None), type, FunctionType, torch.device, torch.dtype)
_CONTAINERS = (dict, list, tuple, set, deque)
_MOST = 1000
"""The most items of a container, and numbers of a tensor, that are kept."""


class HostState:
    """Attributes of an object, with the values that they have when this is made.

    Args:
        owner: the object.
        names: those of the attributes; ``state.tokens`` is one of the object that ``owner`` has as ``state``.
    """

    def __init__(self, owner: Any, names: Iterable[str]) -> None:
        self._owner = owner
        self.values: dict[str, Any] = {}
        """Those of the attributes that are there."""
        self._absent: list[str] = []
        for name in names:
            place, attribute = self._found_at(name)
            if hasattr(place, attribute):
                self.values[name] = _copied(getattr(place, attribute))
            else:
                self._absent.append(name)

    def restore(self) -> None:
        """Set back what has changed, and remove what was not there; any number of times."""
        for name, value in self.values.items():
            place, attribute = self._found_at(name)
            if not equal(getattr(place, attribute, None), value):
                setattr(place, attribute, _copied(value))
        for name in self._absent:
            place, attribute = self._found_at(name)
            vars(place).pop(attribute, None)

    def _found_at(self, name: str) -> tuple[Any, str]:
        *path, attribute = name.split(".")
        return reduce(getattr, path, self._owner), attribute


def _copied(value: Any) -> Any:
    """A deep copy; of long lists of numbers, as metrics are, without a look at each."""
    if isinstance(value, dict):
        result = value.copy()  # of the same kind
        result.update((name, _copied(each)) for name, each in value.items())
        return result
    return value.copy() if _is_numbers(value) else copy.deepcopy(value)


def _is_numbers(value: Any) -> bool:
    """Whether this is a list of numbers, by its last."""
    return isinstance(value, list) and bool(value) and isinstance(value[-1], (int, float))


def state_of(trainer: Any) -> HostState:
    """What a forward pass may change of a trainer: its numbers, containers of these, and what it names."""
    kinds = (*_CONTAINERS, int, float, torch.Tensor)
    names = [
        name
        for name, value in vars(trainer).items()
        if isinstance(value, kinds) and not name.startswith("_adaptive") and _has_numbers(value)
    ]
    return HostState(trainer, [*names, *trainer.restored])


def _has_numbers(value: Any, depth: int = 5) -> bool:
    """Whether a value is numbers, names, and what is made of these, few enough to be copied in each step."""
    if isinstance(value, torch.Tensor):
        return value.numel() <= _MOST and not value.requires_grad
    if isinstance(value, _PLAIN) or _is_numbers(value):
        return True
    parts = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", None)
    if parts is None or isinstance(value, nn.Module) or not depth or len(parts) > _MOST:
        return False
    return all(
        _has_numbers(each, depth - 1)
        for each in (parts.values() if isinstance(parts, dict) else parts)
    )
