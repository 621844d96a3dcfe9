"""The environment that a launcher, such as torchrun, gives a process: all there is before the ranks join a
process group, which is when ``core.Ranks`` takes over."""

from __future__ import annotations

import os

OWN_GROUP = "torchtune-adaptive"
"""The description (``group_desc``) of our own process groups, in which no model launches anything."""


def has_started_this() -> bool:
    return "RANK" in os.environ


def rank() -> int:
    """The rank of this process; 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """The rank among those on this machine."""
    return int(os.environ.get("LOCAL_RANK", rank()))


def local_size() -> int:
    """The number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
