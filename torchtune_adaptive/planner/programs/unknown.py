"""Numbers that follow from weights, which a run on the fake device does not know."""

from __future__ import annotations

import inspect
import linecache
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torchtune_adaptive.common import NoPrediction

_INSIDE = ("torch.", "torchtune_adaptive.planner.", "contextlib", "functools")
"""Beginnings of the names of modules that only pass on what others ask for."""


class Assumed:
    """The values that the user gives for what the program asks, by the place: ``train.py:31``."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._otherwise: list[Any] = []
        self.choices: dict[str, str] = {}
        """How what decides was chosen whose scores nobody knows, by the place in the program."""

    def value(self, what: str) -> Any:
        """The value for the place in the program that asks now.

        Raises:
            NoPrediction: none is given.
        """
        if self._otherwise:
            return self._otherwise[-1]
        frame = next(_callers(inspect.currentframe()), None)
        place = _place(frame)
        if (given := self.given(place)) is not None:
            return given
        raise NoPrediction(
            f"{place}: asks for {what}, which follows from weights that are not there"
            f"{_line(frame)}. Give it with --assume {place.rpartition('/')[2]}=VALUE."
        )

    def given(self, place: str) -> Any:
        """The value that the user gives for a place; None if there is none."""
        return self._values.get(place, self._values.get(place.rpartition("/")[2]))

    @contextmanager
    def otherwise(self, value: Any) -> Iterator[None]:
        """A context in which this is the value of all that nobody knows."""
        self._otherwise.append(value)
        try:
            yield
        finally:
            self._otherwise.pop()


def place_of_caller() -> str:
    """The place in the program that has called what asks now."""
    return _place(next(_callers(inspect.currentframe()), None))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that have called it, but for those that only pass on."""
    while frame is not None:
        name = f"{frame.f_globals.get('__name__', '')}."
        if not name.startswith(_INSIDE):
            yield frame
        frame = frame.f_back


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return "the program"
    parts = frame.f_code.co_filename.split("/")
    within = parts.index("site-packages") + 1 if "site-packages" in parts else len(parts) - 1
    return f"{'/'.join(parts[within:])}:{frame.f_lineno}"


def _line(frame: FrameType | None) -> str:
    line = frame and linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f" ({line})" if line else ""


class UnknownNumber(float):
    """A number that is not known: it may be added up, averaged and logged, and nothing may depend on it."""

    def __new__(cls, assumed: Assumed) -> UnknownNumber:
        self = super().__new__(cls, math.nan)
        self._assumed = assumed
        return self

    _assumed: Assumed

    def _another(self, *_: Any) -> UnknownNumber:
        return UnknownNumber(self._assumed)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _another
    __rtruediv__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = __round__ = _another  # type: ignore
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _another

    def _compared(self, *_: Any) -> Any:
        return self._assumed.value("a number")

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compared

    def __bool__(self) -> bool:
        return bool(self._compared())

    def __int__(self) -> int:
        return int(self._compared())

    __index__ = __trunc__ = __floor__ = __ceil__ = __int__
    __hash__ = float.__hash__

    def __repr__(self) -> str:
        return "unknown"

    __str__ = __repr__

    def __format__(self, specification: str) -> str:
        return "unknown"
