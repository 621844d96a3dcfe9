"""Text for people: tables, sizes as they read and write them, and files that a run can do without."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torchtune_adaptive.common.errors import ConfigError

log = logging.getLogger(__name__)

_MOST_LISTED = 8
_UNITS = ("B", "KiB", "MiB", "GiB")
_BYTES_IN = {"": 1, "B": 1}
_BYTES_IN |= {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}
_BYTES_IN |= {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}
_MOST_BYTES = 1 << 60
AMOUNT_OF_MEMORY = "an amount such as 24GiB, or a number of bytes"
"""The ways to write one, for messages."""


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()
) -> list[str]:
    """The lines of a table, indented by two spaces; ``right`` has the numbers of columns aligned right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def human_bytes(number: int) -> str:
    """Human-readable bytes, three significant digits: ``18.9 GiB``."""
    amount, unit = _scaled(number)
    return f"{amount} {unit}"


def bytes_of(part: int, whole: int) -> str:
    """A part of an amount of memory: ``18.9 of 73.7 GiB``, ``900 MiB of 73.7 GiB``."""
    amount, unit = _scaled(part)
    whole_amount, whole_unit = _scaled(whole)
    unit = "" if unit == whole_unit else f" {unit}"
    return f"{amount}{unit} of {whole_amount} {whole_unit}"


def _scaled(number: int) -> tuple[str, str]:
    amount, unit = float(number), _UNITS[0]
    for unit in _UNITS:
        if abs(amount) < 1024 or unit == _UNITS[-1]:
            break
        amount /= 1024
    return (f"{amount:.0f}" if amount >= 100 or unit == "B" else f"{amount:.3g}"), unit


def amount_of_memory(key: str, value: object) -> int:
    """The bytes of ``24GiB``, ``512 MB`` or a plain number; ``ConfigError`` if it is none of these."""
    try:
        return parse_memory(value)
    except ValueError:
        raise ConfigError(key, value, "is not valid", f"Must be {AMOUNT_OF_MEMORY}") from None


def parse_memory(value: object) -> int:
    """The same, or ``ValueError``."""
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        if match and match[2] in _BYTES_IN:
            size = int(float(match[1]) * _BYTES_IN[match[2]])
            if 0 < size <= _MOST_BYTES:
                return size
    raise ValueError


def printable(text: str) -> str:
    """Text for a terminal, which may have names of somebody else: what would control it is escaped."""
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode()
        for one in text
    )


def counted(number: int, what: str, plural: str = "") -> str:
    """A number of things: ``1 step``, ``80 steps``; ``1 retry``, ``2 retries``."""
    return f"{number:,} {what if number == 1 else plural or f'{what}s'}"


def listed(what: str, names: Sequence[str]) -> str:
    """Things by name, ``rank 0``, ``ranks 0, 1 and 3``, or by number where they are many."""
    if len(names) > _MOST_LISTED:
        return counted(len(names), what)
    *others, last = names
    return f"{what}s {', '.join(others)} and {last}" if others else f"{what} {last}"


def duration(seconds: float) -> str:
    """Human-readable time: ``7.5 s``, ``12 min 5 s``, ``3 h 20 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


@contextmanager
def not_essential(what: str) -> Iterator[None]:
    """Around writing a file that only people read: if it cannot be written, warn and continue."""
    try:
        yield
    except Exception as error:  # of libraries that draw, too
        log.warning(f"{what} was not written ({type(error).__name__}: {error}). The run continues.")
