"""The memory knobs of a step, as switches: changed between two steps, without building anything anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchtune_adaptive.core.step.knobs import LOSS, RESHARD, Choice


class Switches:
    """The knobs that can be changed on a model that is built.

    Args:
        setters: the functions that change each knob, by its key.
        choice: the values that the knobs have.
        layers: the number of layers that can be checkpointed.
    """

    def __init__(
        self,
        setters: Mapping[str, Callable[[Any], None]] | None = None,
        choice: Mapping[str, Any] | None = None,
        layers: int = 0,
    ) -> None:
        self._setters = setters or {}
        self.choice = Choice(choice or {})
        self.layers = layers

    def __contains__(self, key: str) -> bool:
        return key in self._setters

    @property
    def variant(self) -> tuple[Any, ...]:
        """What the knobs say about FSDP's collectives: they are the same where this is.

        Parameters that are kept are not gathered again. A last projection that is sharded by itself is
        gathered for each chunk. What is computed again is computed with what backward gathers anyway.
        """
        return tuple(self.choice.get(key) for key in (RESHARD, LOSS))

    def set(self, choice: Choice) -> None:
        """Use these values."""
        for key, value in choice.items():
            if key in self._setters and value != self.choice.get(key):
                self._setters[key](value)
        self.choice |= choice
