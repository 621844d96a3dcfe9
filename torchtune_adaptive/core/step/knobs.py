"""The memory knobs of a step: settings that trade memory for speed and leave the training as it is.

A knob is known by its key in a config; a step without a config uses the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
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

    def of_any_layers(self) -> Choice:
        """The same for all choices that differ only in what is checkpointed."""
        return self | {CHECKPOINT: None}

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


def first_layers(count: int, layers: int) -> str:
    """The value of the knob ``CHECKPOINT`` for the first so many of a model's layers."""
    return {0: "none", layers: "all"}.get(count, f"{count}_of_{layers}")


@cache
def layers_of(checkpoint: str) -> tuple[int, int] | None:
    """The k and the n of ``k_of_n``; None for other values."""
    count, of, layers = checkpoint.partition("_of_")
    return (int(count), int(layers)) if of else None


def period(checkpoint: str) -> int | None:
    """The number of layers after which it is the same as for those before; None if it never is."""
    if layers_of(checkpoint):
        return None
    return int(checkpoint.removeprefix("every_")) if checkpoint.startswith("every_") else 1


def is_checkpointed(checkpoint: str, number: int) -> bool:
    """Whether a layer is computed again as a whole; they are counted from 1, as torchtune does.

    ``every_2`` of 4 is the second and the fourth. ``2_of_4`` is the first two, as backward comes to them
    last: by the time it computes them again, it has freed what the others have kept.
    """
    if first := layers_of(checkpoint):
        return number <= first[0]
    if checkpoint.startswith("every_"):
        return number % int(checkpoint.removeprefix("every_")) == 0
    return checkpoint == "all"


@cache
def checkpointed_share(checkpoint: str) -> Fraction:
    """The share of layers that are computed again as a whole."""
    if first := layers_of(checkpoint):
        return Fraction(*first)
    if checkpoint.startswith("every_"):
        return Fraction(1, int(checkpoint.removeprefix("every_")))
    return Fraction(checkpoint == "all")


def _saves_nothing(key: str, one: Any, other: Any) -> bool:
    if key == CHECKPOINT:
        return one == other or one == "none" or other == "all" or _keeps_more_layers(one, other)
    if key in (RESHARD, OFFLOADING):
        return bool(one <= other)
    # What is kept of short chunks may take less than what their logits are computed from again. A smaller
    # micro-batch may need more: with accumulation, there are gradients of the one before.
    return bool(one == other)


def _keeps_more_layers(one: str, other: str) -> bool:
    if "operations" in (one, other) or (layers_of(one) and not layers_of(other)):
        return False  # of as many layers, others than the first may need more
    return checkpointed_share(one) <= checkpointed_share(other)
