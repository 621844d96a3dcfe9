"""Metrics of TRL's trainers, which average over batches: those of the parts of a batch, made one.

A trainer appends a value for each batch that it computes a loss of. A batch that is taken in parts has as
many values. They are averaged by what each is a mean of, so that a log does not show how it was divided.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchtune_adaptive.integrations.parts import weighted_mean
from torchtune_adaptive.integrations.terms import Terms

Values = Mapping[str, Sequence[float]]

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
    of_chosen, of_all, chosen_rows = (
        int(tokens.cpu()[chosen].sum()),
        int(tokens.sum()),
        int(chosen.sum()),
    )
    return [*found, of_all, of_chosen, of_all - of_chosen, chosen_rows, len(mask) - chosen_rows]


def copied(value: Any) -> Any:
    """A deep copy; of long lists of numbers, as metrics are, without a look at each."""
    if isinstance(value, dict):
        result = value.copy()  # of the same kind
        result.update((name, copied(each)) for name, each in value.items())
        return result
    if isinstance(value, list) and value and isinstance(value[-1], (int, float)):
        return value.copy()
    return copy.deepcopy(value)


def appended(before: Values, after: Values) -> dict[str, float]:
    """The value that a part of a batch has added to each metric."""
    return {
        name: values[-1]
        for name, values in after.items()
        if len(values) == len(before.get(name, ())) + 1
    }


def averaged(
    trainer: str | None, parts: Sequence[Mapping[str, float]], weights: Sequence[Sequence[float]]
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
        values = [part[name] for part in parts if name in part]
        if name.startswith(("min_", "max_")):
            found[name] = min(values) if name.startswith("min_") else max(values)
            continue
        column = COUNTS.index(means_of.get(name, "rows"))
        of_parts = [row[column] for part, row in zip(parts, weights, strict=True) if name in part]
        found[name] = weighted_mean(values, of_parts)
    both = ("rewards/chosen", "rewards/rejected")
    if trainer == "KTOTrainer" and found.keys() >= {*both}:  # means over different rows
        found["rewards/margins"] = found[both[0]] - found[both[1]]
    return found
