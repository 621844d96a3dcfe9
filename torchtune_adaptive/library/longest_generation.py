"""The memory of transformers' ``generate``: its first and its last pass over the model.

The cache only grows, so one of these two has the peak. Checked against transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

CACHES = "caches of keys and values"
_ACTIVATIONS = "activations"


class Sampling(NamedTuple):
    """What is made of the logits of a token before it is drawn."""

    scaled: bool = False
    """Whether they are divided by a temperature."""
    sorted: bool = False
    """Whether they are sorted, as ``top_p`` needs it."""

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """What is drawn by."""
        scores = logits / 0.9 if self.scaled else logits
        if self.sorted:
            in_order, places = scores.sort(descending=False)
            unlikely = in_order.softmax(-1).cumsum(-1) <= 0.1
            scores = scores.masked_fill(unlikely.scatter(1, places, unlikely), -float("inf"))
        return scores


def generate_longest(
    model: Callable[..., Any],
    config: Any,
    prompts: torch.Tensor,
    tokens: int,
    sampling: Sampling,
    label: Callable[[str], None],
) -> None:
    """Compute what ``generate`` does for prompts when it begins, and when it ends with so many tokens.

    Args:
        model: the model, which gives logits.
        config: its config.
        prompts: the tokens of the prompts.
        tokens: the tokens that are generated for each.
        sampling: what is made of logits.
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
            logits = found.logits[:, -1].to(copy=True, dtype=torch.float32)
            scores = sampling.scores(logits)
            shares = scores.softmax(-1)
            # Where torch draws one of each row, it divides by as many random numbers.
            noise = None if scores.device.type == "cpu" else torch.empty_like(shares)
            del found, noise


def _labelled(cache: Any, label: Callable[[str], None]) -> None:
    """Let what a cache allocates be known as such."""
    update = cache.update

    def kept(keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **named: Any) -> Any:
        label(CACHES)
        try:
            _begin(cache.layers[layer], keys, values)
            return update(keys, values, layer, *args, **named)
        finally:
            label(_ACTIVATIONS)

    cache.update = kept


def _begin(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Begin with nothing in a layer, as it does by itself: by tensors of no numbers, which a trace has only
    where they are like others."""
    if hasattr(layer, "keys") and not layer.is_initialized:
        layer.dtype, layer.device = keys.dtype, keys.device
        layer.keys, layer.values = keys.new_empty(0), values.new_empty(0)
        layer.is_initialized = True


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
    layers = [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", False)
    ]
    for layer in layers:
        layer.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True  # type: ignore[assignment]
