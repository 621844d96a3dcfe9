"""Batches as trees of tensors: torch's containers, and mappings that torch does not know.

transformers' ``BatchEncoding`` is such a mapping; its own ``to`` changes it in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

from torchtune_adaptive.core.private import tree_leaves, tree_map


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with the result of the function in the place of each leaf."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    # Torch takes long for what most batches are.
    if type(tree) is dict:
        return {key: mapped(function, item) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([mapped(function, item) for item in tree])

    def leaf(value: Any) -> Any:
        if not isinstance(value, MutableMapping):
            return function(value)
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = mapped(function, item)
        return result

    return tree_map(leaf, tree)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors among the leaves of a tree."""
    if isinstance(tree, torch.Tensor):
        yield tree
        return
    for value in tree_leaves(tree):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, MutableMapping):
            yield from tensors_in(list(value.values()))


def shape_of(tree: Any) -> tuple[torch.Size, ...]:
    """The shapes of the tensors among the leaves of a tree."""
    return tuple(tensor.shape for tensor in tensors_in(tree))
