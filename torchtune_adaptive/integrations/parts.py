"""What parts of a batch have given, put together as the whole batch would have given it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from torchtune_adaptive.common import UsageError

_PADDING = -100
"""What transformers fills predictions and labels of unequal lengths with."""


def joined(parts: Sequence[Any], rows: Sequence[int], flat: bool = False) -> Any:
    """The predictions of a batch, given those of its parts: tensors in tuples, lists or mappings.

    Args:
        rows: the number of rows in each part.
        flat: whether the rows of a batch follow each other in one.
    """
    first = parts[0]
    if isinstance(first, Mapping):
        found = {name: joined([each[name] for each in parts], rows, flat) for name in first}
        return type(first)(found)  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        return type(first)(joined(each, rows, flat) for each in zip(*parts, strict=True))
    if not isinstance(first, torch.Tensor):
        return first
    if flat:
        return torch.cat(list(parts), 1)
    blocks = first.size(0) // rows[0] if first.dim() else 0
    for each, count in zip(parts, rows, strict=True):
        if not blocks or each.size(0) != blocks * count:
            raise UsageError(
                f"prediction_step: memory has run out, and predictions of shape {list(each.shape)} for "
                f"{count} rows cannot be put together. Give one for each row, or lower "
                "per_device_eval_batch_size."
            )
    longest = max(each.size(1) for each in parts) if first.dim() > 1 else 0
    # Some batches have all rows, and then all of them again, such as the answers that were rejected.
    pieces = [_widened(each, longest).chunk(blocks) for each in parts]
    return torch.cat([some[block] for block in range(blocks) for some in pieces])


def _widened(tensor: torch.Tensor, longest: int) -> torch.Tensor:
    if tensor.dim() < 2 or tensor.size(1) == longest:
        return tensor
    behind = [0, 0] * (tensor.dim() - 2) + [0, longest - tensor.size(1)]
    return pad(tensor, behind, value=_PADDING)


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The mean of the parts that have any weight; where none has, the first."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    if len({value for value, _ in pairs}) <= 1:
        return pairs[0][0] if pairs else values[0]
    total = math.fsum(weight for _, weight in pairs)
    return math.fsum(value * weight for value, weight in pairs) / total
