"""What a trainer averages over batches, its metrics and logs, where a step was taken in other parts.

A trainer of TRL appends a value of each metric for each batch that it computes a loss of; a ``compute_loss``
of the user's own may log for each. A step that is taken in other parts than these batches has as many values
as parts. They are averaged by the rows of each, so that logs have as many values as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torchtune_adaptive.integrations.parts import weighted_mean

Values = Mapping[str, Sequence[float]]
Added = Mapping[str, float | None]


@contextmanager
def noted(metrics: Callable[[], Values]) -> Iterator[Added]:
    """A context that gives what is added to each metric in it; None to one whose value is replaced."""
    before = {name: (values, len(values)) for name, values in metrics().items()}
    added: dict[str, float | None] = {}
    yield added
    for name, values in metrics().items():
        same, count = before.get(name, (values, 0))
        if values is not same:
            added[name] = None
        elif len(values) == count + 1:
            added[name] = values[-1]


@dataclass(frozen=True)
class Part:
    """A part of the rows of some batches."""

    rows: int
    added: Added = field(default_factory=dict)
    """What it has added to each metric."""
    logs: Sequence[dict[str, Any]] = ()
    """What it has logged."""


def averaged(parts: Sequence[Part]) -> dict[str, float]:
    """The metrics of a batch, given those of its parts, but for those whose value is replaced."""
    found = {}
    for name in dict.fromkeys(name for part in parts for name in part.added):
        pairs = [(part.added[name], part.rows) for part in parts if name in part.added]
        values = [value for value, _ in pairs if value is not None]
        if len(values) < len(pairs):
            continue
        if name.startswith(("min_", "max_")):
            found[name] = min(values) if name.startswith("min_") else max(values)
        else:
            found[name] = weighted_mean(values, [rows for _, rows in pairs])
    return found


def settle(
    metrics: dict[str, list[float]], before: Values, batches: int, parts: Sequence[Part]
) -> None:
    """Give metrics a value for each of so many batches, in the place of those of the parts.

    Args:
        before: the metrics before these batches.
    """
    for name, value in averaged(parts).items():
        metrics[name] = [*before.get(name, ()), *[value] * batches]


def logs_of_batches(batches: int, parts: Sequence[Part]) -> list[dict[str, Any]]:
    """What is logged of so many batches, given what their parts have logged: numbers are averaged."""
    turns = max((len(part.logs) for part in parts), default=0)
    found = []
    for turn in range(turns):
        those = [Part(part.rows, part.logs[turn]) for part in parts if len(part.logs) > turn]
        found.append(
            {**those[0].added, **averaged([Part(p.rows, _numbers(p.added)) for p in those])}
        )
    return found * batches


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in logs.items() if isinstance(value, (int, float))}
