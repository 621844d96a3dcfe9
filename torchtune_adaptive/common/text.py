"""Text for people: tables, sizes, and files that a run can do without."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

log = logging.getLogger(__name__)

_MOST_LISTED = 8
_UNITS = ("B", "KiB", "MiB", "GiB")


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
    except OSError as error:
        log.warning(f"{what} was not written: {error}. The run continues.")
