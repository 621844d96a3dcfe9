"""The memory knobs of a step: settings that trade memory for speed and leave the training as it is.

A knob is known by its key in a config; a step without a config uses the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Choice = Mapping[str, Any]
"""A value for each knob of a config, by its key."""


CHECKPOINT = "adaptive_batching.checkpoint"
RECOMPUTE_LOSS = "adaptive_batching.recompute_loss"
OFFLOADING = "enable_activation_offloading"
RESHARD = "fsdp_reshard_after_forward"
LOSS = "loss._component_"
COMPILE = "compile"

CHUNKED = "torchtune.modules.loss.CEWithChunkedOutputLoss"


def checkpoints_every(checkpoint: str) -> int | None:
    """The n of ``every_n``; 1 where all layers are checkpointed, None where none is as a whole."""
    if checkpoint == "all":
        return 1
    return int(checkpoint.removeprefix("every_")) if checkpoint.startswith("every_") else None


def is_possible(choice: Choice) -> bool:
    """Whether the values go together."""
    if choice.get(OFFLOADING) and choice[CHECKPOINT] != "all":
        return False  # elsewhere there is too much to move in the time that there is
    if choice.get(COMPILE) and choice[CHECKPOINT] == "operations":
        return False
    return not (choice.get(RECOMPUTE_LOSS) and choice.get(LOSS, CHUNKED) != CHUNKED)


def needs_as_much(one: Choice, other: Choice) -> bool:
    """Whether a choice certainly needs no less memory than another: in no knob does it save any."""
    return all(_saves_nothing(key, one[key], value) for key, value in other.items())


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
