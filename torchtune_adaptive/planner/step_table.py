"""Tables of steps: what micro-batches of many sizes take on several devices, and their speeds.

All sizes follow from the traces that a plan of one size needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from torchtune_adaptive.common import largest
from torchtune_adaptive.planner.memory.peak import DOES_NOT_FIT, DeviceLimits, Peak
from torchtune_adaptive.planner.speed.speed import Pace, Speed
from torchtune_adaptive.planner.traced_run import Question, TracedRun

_AT_LEAST = 8
"""Rows up to which a table goes in any case."""


@dataclass(frozen=True)
class OnDevice:
    """What the micro-batches of a table take on one device."""

    device: DeviceLimits
    largest: int
    """Largest micro-batch that fits; 0 if none does."""
    peaks: Sequence[Peak]
    """The peak of each size."""
    speeds: Sequence[Speed | None]
    """The speed of each size; None where it does not fit, or is not known."""


@dataclass(frozen=True)
class StepTable:
    """The steps of one run with micro-batches of many sizes."""

    rows: tuple[int, ...]
    """The sizes."""
    on_devices: Sequence[OnDevice]
    uneven: bool = False
    """Whether ranks hold different shares of the parameters, so that another rank has another table."""
    as_written: str = ""
    """The reason why something that is compiled was predicted as it is written; empty if nothing was."""


def table_of(
    run: TracedRun,
    asked: Question,
    devices: Sequence[tuple[DeviceLimits, Pace | None]],
    rows: tuple[int, ...] | None = None,
    few: bool = False,
) -> StepTable:
    """The table of a run.

    Args:
        run: its traces.
        asked: what is asked about it; its largest micro-batch is verified on its device, as a plan does.
        devices: the devices of the table, each with the pace of a run on it, or None if no speed is wanted.
        rows: the sizes; by default as many as tell what fits on all of the devices.
        few: whether only powers of two are wanted, because each size takes a trace.
    """
    own = run.largest(asked.length, asked.device, asked.ceiling, confirmed=True)
    if rows is None:
        biggest = max((device for device, _ in devices), key=lambda device: device.usable_bytes)
        most = run.largest(asked.length, biggest, asked.ceiling)
        rows = sizes(asked.rows or 1, own, most, few or run.direct)
    found = []
    for device, pace in devices:
        peaks = [run.peak(size, asked.length, device) for size in rows]
        here = replace(asked, device=device, pace=pace)
        speeds = [
            run.speed(here, one.rows) if one.verdict(device) != DOES_NOT_FIT else None
            for one in peaks
        ]
        found.append(OnDevice(device, _largest(run, peaks, device), peaks, speeds))
    return StepTable(rows, found)


def _largest(run: TracedRun, peaks: Sequence[Peak], device: DeviceLimits) -> int:
    """The largest micro-batch that fits, found from the peaks of some."""
    length, usable = peaks[0].length, device.usable_bytes
    above = next((n for n, one in enumerate(peaks) if one.reserved > usable), len(peaks) - 1)
    low, high = peaks[max(0, above - 1)], peaks[above]
    each = max(1, (high.reserved - low.reserved) // max(1, high.rows - low.rows))
    guess = low.rows + (usable - low.reserved) // each
    return largest(lambda rows: run.peak(rows, length, device).reserved <= usable, guess)


def sizes(configured: int, own: int, largest: int, few: bool = False) -> tuple[int, ...]:
    """The sizes of a table: what is configured, the largest that fits on its device (``own``), and others
    up to twice the ``largest`` that fits on any; only powers of two if ``few`` are wanted."""
    end = max(2 * largest, 2 * configured, _AT_LEAST)
    others = takewhile(lambda size: size <= end, _powers() if few else _powers_and_between())
    return tuple(sorted({*others, configured, *([own] if own else [])}))


def _powers() -> Iterator[int]:
    size = 1
    while True:
        yield size
        size *= 2


def _powers_and_between() -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ..."""
    for size in _powers():
        yield size
        if size > 1:
            yield size * 3 // 2
