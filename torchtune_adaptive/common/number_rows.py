"""Rows of whole numbers as text for JSON: written and read far faster than as lists, and smaller."""

from __future__ import annotations

import zlib
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from itertools import chain

_FASTEST = 1
"""The level of compression."""


def packed_rows(rows: Iterable[Iterable[int]]) -> str:
    """The text for rows of numbers of 64 bits, each row of as many."""
    numbers = array("q", chain.from_iterable(rows))
    return b64encode(zlib.compress(numbers.tobytes(), _FASTEST)).decode()


def unpacked_rows(text: str, width: int) -> Iterator[tuple[int, ...]]:
    """The rows, each of so many numbers.

    Raises:
        ValueError: the text is not what ``packed_rows`` gives.
    """
    try:
        numbers = array("q", zlib.decompress(b64decode(text, validate=True)))
    except zlib.error as error:
        raise ValueError(str(error)) from None
    return zip(*[iter(numbers)] * width, strict=True)
