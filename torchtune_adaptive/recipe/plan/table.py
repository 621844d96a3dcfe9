"""The tables of a config's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchtune_adaptive.planner import DeviceLimits, Pace, step_table
from torchtune_adaptive.recipe.plan.query import Query


def tabulated(
    query: Query,
    devices: Sequence[tuple[DeviceLimits, Pace | None]],
    rows: tuple[int, ...] | None = None,
) -> step_table.StepTable:
    """The table of a config; the arguments are those of ``table_of``. Call it in a process that does nothing
    else: see ``workers``."""
    traces = query.traces()
    run = query.run(traces)
    # Operations of compiled steps do not follow from others, so each size takes a trace.
    found = step_table.table_of(run, query.question, devices, rows, few=traces.compiled)
    traces.remember()
    return replace(found, uneven=bool(traces.uneven), as_written=traces.as_written)
