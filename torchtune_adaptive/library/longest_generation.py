"""The memory of transformers' ``generate``: its first and its last pass over the model.

The cache only grows, so one of these two has the peak. Checked against transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

CACHES = "caches of keys and values"
_ACTIVATIONS = "activations"


def generate_longest(
    model: Callable[..., Any],
    config: Any,
    prompts: torch.Tensor,
    tokens: int,
    label: Callable[[str], None],
) -> None:
    """Compute what ``generate`` does for prompts when it begins, and when it ends with so many tokens.

    Args:
        model: the model, which gives logits.
        config: its config.
        prompts: the tokens of the prompts.
        tokens: the tokens that are generated for each.
        label: says what is allocated next.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    _labelled(cache, label)
    one_token = {
        "input_ids": prompts[:, :1].clone(),
        "position_ids": torch.full_like(prompts[:, :1], prompts.shape[1] + tokens - 2),
    }
    passes = [{"input_ids": prompts}, one_token][:tokens]
    with torch.no_grad():
        for inputs in passes:
            if inputs is one_token:
                label(CACHES)
                _lengthen(cache, prompts.shape[1] + tokens - 2)
                label(_ACTIVATIONS)
            found = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            # What the pass before has made of its logits is held until then.
            scores = found.logits[:, -1].to(copy=True, dtype=torch.float32)
            shares = scores.softmax(-1)
            # Where torch draws one of each row, it divides by as many random numbers.
            noise = None if scores.device.type == "cpu" else torch.empty_like(shares)
            del found, noise


def _labelled(cache: Any, label: Callable[[str], None]) -> None:
    """Let what a cache allocates be known as such."""
    update = cache.update

    def kept(*args: Any, **named: Any) -> Any:
        label(CACHES)
        try:
            return update(*args, **named)
        finally:
            label(_ACTIVATIONS)

    cache.update = kept


def _lengthen(cache: Any, length: int) -> None:
    """Let a cache be as large as after so many tokens; what does not grow with them is left."""
    for layer in cache.layers:
        if not isinstance(getattr(layer, "keys", None), torch.Tensor):
            continue
        kept = length
        if layer.is_sliding:
            kept = min(length, layer.sliding_window - 1)
            layer.cumulative_length = length
        for name in ("keys", "values"):
            rows, heads, _, width = getattr(layer, name).shape
            setattr(layer, name, None)  # or both would be held
            longer = torch.empty(rows, heads, kept, width, dtype=layer.dtype, device=layer.device)
            setattr(layer, name, longer)


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """A context in which no layer is checkpointed, as caches need it."""
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for layer in layers:
        layer.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True  # type: ignore[assignment]
