"""The memory knobs of a step: settings that trade memory for speed and leave the training as it is.

A knob is known by its key in a config; a step without a config uses the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CHECKPOINT = "adaptive_batching.activation_checkpointing"
RECOMPUTE_LOSS = "adaptive_batching.recompute_loss"
OFFLOADING = "enable_activation_offloading"
RESHARD = "fsdp_reshard_after_forward"
LOSS = "loss._component_"
COMPILE = "compile"
MICRO_BATCH = "batch_size"

CHUNKED = "torchtune.modules.loss.CEWithChunkedOutputLoss"


class Choice(Mapping[str, Any]):
    """A value for each knob, by its key. It never changes, and equal ones have the same hash."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"Choice({self._values})"

    def __or__(self, values: Mapping[str, Any]) -> Choice:
        """The choice with other values for some knobs."""
        return Choice({**self, **values})

    @property
    def checkpoints_every(self) -> int | None:
        """The n where every n-th layer is checkpointed; None where none is as a whole."""
        return checkpoints_every(self[CHECKPOINT])

    def is_possible(self) -> bool:
        """Whether the values go together."""
        if self.get(OFFLOADING) and self[CHECKPOINT] != "all":
            return False  # elsewhere there is too much to move in the time that there is
        if self.get(COMPILE) and self[CHECKPOINT] == "operations":
            return False
        return not (self.get(RECOMPUTE_LOSS) and self.get(LOSS, CHUNKED) != CHUNKED)

    def needs_as_much_as(self, other: Choice) -> bool:
        """Whether it certainly needs no less memory than another one: in no knob does it save any."""
        return all(_saves_nothing(key, self[key], value) for key, value in other.items())

    def leaner_than(self, other: Choice) -> bool:
        """Whether it is another choice that certainly needs no more memory."""
        return other.needs_as_much_as(self) and self != other

    @staticmethod
    def leanest(choices: Sequence[Choice]) -> list[Choice]:
        """Those that may need the least memory: no other is certainly leaner."""
        return [one for one in choices if not any(other.leaner_than(one) for other in choices)]


@dataclass(eq=False, repr=False)
class Switches:
    """The knobs that can be changed on a model that is built, between two steps."""

    setters: Mapping[str, Callable[[Any], None]] = field(default_factory=dict)
    """The functions that change each knob, by its key."""
    choice: Choice = field(default_factory=lambda: Choice({}))
    """The values that the knobs have."""
    layers: int = 0
    """The number of layers that can be checkpointed."""

    def __contains__(self, key: str) -> bool:
        return key in self.setters

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
            if key in self.setters and value != self.choice.get(key):
                self.setters[key](value)
        self.choice |= choice


def checkpoints_every(checkpoint: str) -> int | None:
    """The n of ``every_n``; 1 where all layers are checkpointed, None where none is as a whole."""
    if checkpoint == "all":
        return 1
    return int(checkpoint.removeprefix("every_")) if checkpoint.startswith("every_") else None


def _saves_nothing(key: str, one: Any, other: Any) -> bool:
    if key == CHECKPOINT:
        return one == other or one == "none" or other == "all" or _keeps_more_layers(one, other)
    if key in (RESHARD, OFFLOADING):
        return bool(one <= other)
    # What is kept of short chunks may take less than what their logits are computed from again. A smaller
    # micro-batch may need more: with accumulation, there are gradients of the one before.
    return bool(one == other)


def _keeps_more_layers(one: str, other: str) -> bool:
    few, many = checkpoints_every(one), checkpoints_every(other)
    return few is not None and many is not None and few >= many
