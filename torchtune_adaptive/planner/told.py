"""What a process that traces is doing, told to the one that waits for it, in words.

The words stand in memory that both processes share. Whoever tells them never waits and makes no system call,
and whoever reads them sees the latest. The one that waits owns the memory, so that nothing is left of a
process that ends, however it does. No torch in here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from typing import Any

_LONGEST = 200
"""Bytes of the longest words."""
_SLOTS = 4


class _Slots(ctypes.Structure):
    """Words are written beside those that may just be read, and take their place then."""

    _fields_ = (("latest", ctypes.c_ubyte), ("words", (ctypes.c_char * _LONGEST) * _SLOTS))


class Told:
    """Words that one process tells another; ``context`` starts the one that tells them."""

    def __init__(self, context: BaseContext) -> None:
        self._slots: Any = context.RawValue(_Slots)

    @property
    def words(self) -> str:
        slots = self._slots
        return bytes(slots.words[slots.latest].value).decode(errors="ignore")

    @words.setter
    def words(self, words: str) -> None:
        slots = self._slots
        slot = (slots.latest + 1) % _SLOTS
        slots.words[slot].value = words.encode()[: _LONGEST - 1]
        slots.latest = slot


_listener: Told | None = None
_where: list[str] = []


def listen(told: Told | None) -> None:
    """Tell there, or nowhere, what this process does from now on."""
    global _listener
    _listener = told


def tell(doing: str) -> None:
    """Tell what is done from now on."""
    if _listener is not None:
        _listener.words = ", ".join(filter(None, [doing, *reversed(_where)]))


@contextmanager
def telling(where: str) -> Iterator[None]:
    """A context in which it is told, too, in which step or of which model that is; nothing more if empty."""
    _where.append(where)
    try:
        yield
    finally:
        _where.pop()
