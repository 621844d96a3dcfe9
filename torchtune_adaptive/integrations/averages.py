"""What a trainer averages over batches, its metrics and logs: that of the parts of a batch, made one.

A trainer of TRL appends a value of each metric for each batch that it computes a loss of; a ``compute_loss``
of the user's own may log for each. A batch that is taken in parts has as many values. They are averaged by
what each is a mean of, so that a log does not show how it was divided. Where a part has rows of several
batches, its value is that of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from torchtune_adaptive.integrations import private, refusals
from torchtune_adaptive.integrations.parts import weighted_mean
from torchtune_adaptive.integrations.terms import Terms

Values = Mapping[str, Sequence[float]]
Added = Mapping[str, float | None]

COUNTS = ("rows", "labels", "tokens", "chosen", "rejected", "chosen rows", "rejected rows")
"""What a metric may be a mean of: rows, labels but the first of each row, tokens of completions: all, those
of answers that were chosen, or rejected; and such rows, where each has one answer."""

_OF_COMPLETIONS = {
    "entropy": "tokens",
    "mean_token_accuracy": "chosen",
    "logits/chosen": "chosen",
    "logits/rejected": "rejected",
}
_OF_ANSWERS = {
    f"{name}/{which}": f"{which} rows"
    for name in ("rewards", "logps")
    for which in ("chosen", "rejected")
}
_MEANS_OF = {
    "SFTTrainer": {"entropy": "labels", "mean_token_accuracy": "labels"},
    "DPOTrainer": _OF_COMPLETIONS,
    "KTOTrainer": _OF_COMPLETIONS | _OF_ANSWERS,
}
"""Metrics of trainers that are no means over rows."""


def counts(inputs: Any, rows: int) -> list[int]:
    """How much a batch has of each of ``COUNTS``."""
    found = [rows, Terms.LATER_LABELS.number(inputs, rows)]
    mask = inputs.get("completion_mask") if isinstance(inputs, Mapping) else None
    if not isinstance(mask, torch.Tensor):
        return found + [0] * (len(COUNTS) - len(found))
    tokens, chosen = mask[..., 1:].sum(-1), torch.arange(len(mask)) < rows
    if len(mask) == rows and "label" in inputs:  # of each row; else rejected answers follow
        chosen = torch.as_tensor(inputs["label"]).cpu().bool()
    of_all, of_chosen = int(tokens.sum()), int(tokens.cpu()[chosen].sum())
    chosen_rows = int(chosen.sum())
    return [*found, of_all, of_chosen, of_all - of_chosen, chosen_rows, len(mask) - chosen_rows]


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

    rows: Sequence[int]
    """Their numbers."""
    added: Added = field(default_factory=dict)
    """What it has added to each metric."""
    inputs: Any = None
    """The batch that was made of them, on this rank."""
    logs: Sequence[dict[str, Any]] = ()
    """What it has logged."""


def settle(
    trainer: Any,
    mode: str,
    before: Values,
    batches: Sequence[int],
    parts: Sequence[Part],
    everyones: bool,
) -> None:
    """Give a trainer's metrics a value for each batch, in the place of those of the parts; on all ranks.

    Args:
        mode: ``train`` or ``eval``.
        before: the metrics before these batches.
        batches: the number of rows in each batch.
        parts: the same number on each rank.
        everyones: whether a part counts by what it has on all ranks, which is one more collective, and not by
            what it has on this one.
    """
    if not any(part.added for part in parts):
        return
    metrics = private.metrics_in(vars(trainer), mode)
    weights = [counts(part.inputs, len(part.rows)) for part in parts]
    if everyones:
        counted = torch.tensor([weights], device=trainer.accelerator.device)
        # Of the ranks whose metrics count, at the end of the data, too.
        weights = trainer.accelerator.gather_for_metrics(counted).sum(0).tolist()
    own = refusals.name_in_trl(type(trainer))
    found: dict[str, list[float]] = {}
    for end, size in zip(accumulate(batches), batches, strict=True):
        within = range(end - size, end)
        shares = [sum(row in within for row in part.rows) / len(part.rows) for part in parts]
        some = [
            (part.added, row, share)
            for part, row, share in zip(parts, weights, shares, strict=True)
            if share
        ]
        values = averaged(
            own,
            [added for added, _, _ in some],
            [[share * count for count in row] for _, row, share in some],
        )
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    replaced = {name for part in parts for name, value in part.added.items() if value is None}
    for name in found.keys() - replaced:
        metrics[name] = [*before.get(name, ()), *found[name]]


def averaged(
    trainer: str | None, parts: Sequence[Added], weights: Sequence[Sequence[float]]
) -> dict[str, float]:
    """The metrics of a batch.

    Args:
        trainer: the name of the trainer.
        parts: the metrics of each part of the batch.
        weights: how much each part has of each of ``COUNTS``, on all ranks.
    """
    means_of = _MEANS_OF.get(trainer or "", {})
    found = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        column = COUNTS.index(means_of.get(name, "rows"))
        pairs = [
            (value, row[column])
            for part, row in zip(parts, weights, strict=True)
            if (value := part.get(name)) is not None
        ]
        values, of_parts = [value for value, _ in pairs], [weight for _, weight in pairs]
        if name.startswith(("min_", "max_")):
            found[name] = min(values) if name.startswith("min_") else max(values)
        elif values:
            found[name] = weighted_mean(values, of_parts)
    both = ("rewards/chosen", "rewards/rejected")
    if trainer == "KTOTrainer" and found.keys() >= {*both}:  # means over different rows
        found["rewards/margins"] = found[both[0]] - found[both[1]]
    return found


def logs_of_batches(batches: int, parts: Sequence[Part]) -> list[dict[str, Any]]:
    """What is logged of so many batches, given what their parts have logged: numbers are averaged by rows."""
    turns = max((len(part.logs) for part in parts), default=0)
    found = []
    for turn in range(turns):
        there = [part for part in parts if len(part.logs) > turn]
        numbers = [_numbers(part.logs[turn]) for part in there]
        means = averaged(None, numbers, [[len(part.rows)] for part in there])
        found.append({**there[0].logs[turn], **means})
    return found * batches


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in logs.items() if type(value) in (int, float)}
