"""Activation checkpointing of a step: by two functions, or of layers one by one, the first k of n."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from torchtune_adaptive.common import UsageError, arguments
from torchtune_adaptive.core import knobs, recompute

_CONFIGURED = "configured"
"""The name of the layers that the caller has chosen, where they are not the first ones."""


class LayerCheckpointing:
    """Activation checkpointing of so many of a model's layers, which changes no bit of a step.

    The first layers are checkpointed, as backward comes to them last. All are, or those that are
    ``configured``, until ``find_fastest`` chooses or ``set`` is called.

        layers = LayerCheckpointing(model.layers)
        step = AdaptiveStep(model, optimizer, forward, activation_checkpointing=layers)
        size = find_fastest(step, worst_case, rows=16)

    Args:
        layers: the layers, in the order in which the model runs them.
        switch: function that turns checkpointing of one layer on or off; by default, the layer's ``forward``
            runs in torch's ``checkpoint`` where it is on.
        configured: whether each layer is checkpointed in the beginning, which is what ``find_fastest`` keeps
            if nothing else is faster; by default, all are.

    Raises:
        UsageError: these are no layers, or one is there twice.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        switch: Callable[[nn.Module, bool], None] | None = None,
        configured: Sequence[bool] | None = None,
    ) -> None:
        self._layers = list(layers)
        if not self._layers or not all(isinstance(each, nn.Module) for each in self._layers):
            raise UsageError(
                f"layers: {layers!r} are not layers of a model. Pass its modules, such as model.layers."
            )
        if len({*map(id, self._layers)}) < len(self._layers):
            raise UsageError("layers: one is there twice, so it cannot be switched by itself.")
        if switch is None:
            switched = {id(each): recompute.SwitchedLayer(each) for each in self._layers}

            def switch(layer: nn.Module, on: bool) -> None:
                switched[id(layer)].recomputed = "everything" if on else "nothing"

        self._switch = arguments.function("switch", switch)
        self._configured = [True] * self.layers if configured is None else [*map(bool, configured)]
        if len(self._configured) != self.layers:
            raise UsageError(
                f"configured: it says of {len(self._configured)} layers whether they are checkpointed, and "
                f"there are {self.layers}."
            )
        first = self.name(sum(self._configured))
        self.configured = first if self._first(first) == self._configured else _CONFIGURED
        """The name of the layers that are checkpointed in the beginning."""
        self.use(self.configured)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self._layers)

    def set(self, checkpointed: int) -> None:
        """Checkpoint so many layers, the first ones, from the next step on; on all ranks alike."""
        if not 0 <= checkpointed <= self.layers:
            raise UsageError(
                f"checkpointed: {checkpointed} of {self.layers} layers is not possible."
            )
        self.use(self.name(checkpointed))

    def name(self, checkpointed: int) -> str:
        """The value of the memory knob for so many layers."""
        return knobs.first_layers(checkpointed, self.layers)

    def use(self, name: str) -> None:
        """Checkpoint the layers of a name."""
        if name not in (_CONFIGURED, *map(self.name, range(self.layers + 1))):
            raise UsageError(
                f"activation_checkpointing: {name} cannot be used here, with {self.layers} layers. Continue "
                "with the model that the state was saved with."
            )
        chosen = self._configured if name == _CONFIGURED else self._first(name)
        for layer, on in zip(self._layers, chosen, strict=True):
            self._switch(layer, on)
        self.now, self.checkpointed = name, sum(chosen)

    def _first(self, name: str) -> list[bool]:
        return [knobs.is_checkpointed(name, number) for number in range(1, self.layers + 1)]


def switches_of(activation_checkpointing: Any) -> knobs.Switches:
    """The switch of activation checkpointing that a caller's two functions make, or its layers."""
    given = activation_checkpointing
    if given is None:
        return knobs.Switches()
    if isinstance(given, LayerCheckpointing):
        now = knobs.Choice({knobs.CHECKPOINT: given.now})
        return _OfCaller({knobs.CHECKPOINT: given.use}, now, given.layers)
    if not isinstance(given, tuple) or len(given) != 2 or not all(map(callable, given)):
        raise UsageError(
            f"activation_checkpointing: {given!r} is not two functions, one that turns it on, and one that "
            "turns it off; nor is it a LayerCheckpointing."
        )
    on, off = given
    setter = lambda value: on() if value == "all" else off()  # noqa: E731
    return _OfCaller({knobs.CHECKPOINT: setter}, knobs.Choice({knobs.CHECKPOINT: "none"}))


class _OfCaller(knobs.Switches):
    """Checkpointing as the caller has it: nobody knows whether it gathers parameters again."""

    @property
    def variant(self) -> tuple[Any, ...]:
        return (self.choice[knobs.CHECKPOINT],)
