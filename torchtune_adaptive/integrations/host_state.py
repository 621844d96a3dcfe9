"""What a forward pass changes on the host: attributes of a trainer, such as metrics."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import reduce
from typing import Any


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
        """Give them these values again, and remove what was not there; any number of times."""
        for name, value in self.values.items():
            place, attribute = self._found_at(name)
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
    if isinstance(value, list) and value and isinstance(value[-1], (int, float)):
        return value.copy()
    return copy.deepcopy(value)
