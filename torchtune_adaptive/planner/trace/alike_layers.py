"""Layers of a model that are alike, of which a trace needs only some."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

_LONGEST_PERIOD = 8
"""The most layers that may have to pass before they repeat, as with full attention in every sixth."""
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class _Run(NamedTuple):
    """Layers that repeat: the first, the one after the last, and the number after which they do."""

    begin: int
    end: int
    period: int


class Shortening:
    """Removes repetitions of the layers of a model that has just been built, and of those as deep.

    Args:
        kept: number of repetitions that are left.
        period: number of layers after which something else repeats, such as checkpointing every second one.
        least: number of repetitions that are worth removing; a model with fewer of them to remove is left
            whole.
    """

    def __init__(self, kept: int, period: int = 1, least: int = 1) -> None:
        self.kept, self.period, self.least = kept, period, least
        self._deepest: tuple[_Run, int] | None = None
        self.repetitions = 0
        """The number of repetitions that the model has."""

    @property
    def removed(self) -> int:
        """The number of repetitions that are removed."""
        removed = self.repetitions - self.kept
        return removed if removed >= self.least else 0

    @property
    def layers(self) -> int:
        """The number of layers that the model has."""
        return self._deepest[1] if self._deepest else 0

    @property
    def removed_layers(self) -> int:
        """The number of layers that are removed."""
        return self.removed * self._deepest[0].period if self._deepest else 0

    def still_repeats(self, model: nn.Module) -> bool:
        """Whether the layers of a model that was left whole are still alike, whatever was done to it."""
        return all(
            _repeating(layers, self.period) == self._deepest[0]
            for layers in lists_of_layers(model)
            if self._deepest is not None and len(layers) == self._deepest[1]
        )

    def __call__(self, model: nn.Module) -> None:
        for layers in lists_of_layers(model):
            run, count = _repeating(layers, self.period), len(layers)
            if self._deepest is None:
                self._deepest = run, count
                self.repetitions = (run.end - run.begin) // run.period
            if (run, count) == self._deepest:
                del layers[run.end - self.removed_layers : run.end]


def lists_of_layers(model: nn.Module) -> Sequence[nn.ModuleList]:
    """A model's lists of layers, the longest first; those inside of layers are not among them."""

    def below(module: nn.Module) -> Iterator[nn.ModuleList]:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                yield child
            else:
                yield from below(child)

    return sorted(below(model), key=len, reverse=True)


def _repeating(layers: nn.ModuleList, step: int) -> _Run:
    """The longest run of layers that repeat after a multiple of ``step`` layers."""
    kinds = _kinds(layers)
    best = _Run(0, 0, step)
    for period in range(step, step * _LONGEST_PERIOD + 1, step):
        begin = 0
        for at in range(period, len(kinds) + 1):
            if at == len(kinds) or kinds[at] != kinds[at - period]:
                if at - begin > best.end - best.begin:
                    best = _Run(begin, at, period)
                begin = at - period + 1
    return best


def _kinds(layers: nn.ModuleList) -> list[Hashable]:
    """What decides what each layer does, but for its place."""
    found = [dict(_facts(layer)) for layer in layers]
    places = [
        key
        for key in found[0]
        if all(facts.get(key) == place for place, facts in enumerate(found)) and len(found) > 2
    ]
    for facts in found:
        for key in places:
            del facts[key]
    return [tuple(facts.items()) for facts in found]


def _facts(layer: nn.Module) -> Iterator[tuple[Any, Any]]:
    for name, module in layer.named_modules():
        yield name, type(module)
        for key, value in sorted(vars(module).items()):
            if type(value) in _PLAIN:
                yield (name, key), value
    for name, tensor in chain(layer.named_parameters(), layer.named_buffers()):
        yield (
            (name, "tensor"),
            (type(tensor), tensor.shape, tensor.dtype, tensor.requires_grad),
        )
