"""The decision whether each rank saves its part of a checkpoint, or rank 0 gathers them all."""

from __future__ import annotations

import logging
import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

from torchtune_adaptive.common import CheckpointError, announce, durable, human_bytes, launcher
from torchtune_adaptive.recipe.checkpoints.all_or_none import AllOrNone
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.setup.cgroups import available_memory

log = logging.getLogger(__name__)

_SHARE_OF_HOST = 4
"""The part of the free memory of rank 0's host, as 1 / n, from which on checkpoints are not gathered."""
_FOLDER_IS_SEEN_WITHIN = 10.0  # seconds, on network filesystems


def saves_sharded(
    asked: bool | None, in_background: bool, gathered: int, folder: Path, everyone: AllOrNone
) -> bool:
    """Whether each rank saves its part; the same on all ranks.

    Args:
        asked: what the config says, if it does.
        in_background: whether checkpoints are written while training continues, which sharded ones can be.
        gathered: the bytes that a gathered checkpoint takes of rank 0's host.
        folder: the output folder.

    Raises:
        CheckpointError: on all ranks, if neither is possible.
    """
    free = everyone.decide(available_memory)
    several = launcher.size() > launcher.local_size()
    too_much = gathered * _SHARE_OF_HOST > free
    shards = several or too_much if asked is None else asked
    if (shards or in_background) and several and not is_shared(folder, everyone):
        if asked or in_background:
            raise CheckpointError(
                f"{folder}: is not the same folder on all machines, so sharded checkpoints, of which each "
                "rank writes a part, would have no common place. Set output_dir to a folder that all share, "
                f"or {BLOCK}.sharded_checkpoints=False and enable_async_checkpointing=False."
            )
        shards = False
    if not shards and gathered > free:
        raise CheckpointError(
            f"{BLOCK}.sharded_checkpoints: a checkpoint would be gathered on rank 0, which takes "
            f"{human_bytes(gathered)} of its host ({human_bytes(free)} are free). Set it to True, with an "
            "output_dir that all machines share."
        )
    if shards and asked is None:
        why = "there are several machines"
        if too_much:
            why = (
                f"gathering takes {human_bytes(gathered)} of rank 0's host, of which {human_bytes(free)} are "
                "free"
            )
        line = f"Checkpoints are sharded, each rank writes its part: {why}."
        announce(log, line, rank_zero=everyone.ranks.is_zero)
    return shards


def is_shared(folder: Path, everyone: AllOrNone) -> bool:
    """Whether it is one folder to all ranks."""
    probe = folder / everyone.decide(lambda: f".shared.{uuid.uuid4().hex[:8]}")
    everyone.decide(lambda: durable.write_durably(probe, b"?"))
    until = time.monotonic() + _FOLDER_IS_SEEN_WITHIN
    while not (seen := probe.exists()) and time.monotonic() < until:
        time.sleep(0.1)
        with suppress(OSError):
            os.listdir(folder)  # network filesystems remember what was not there
    seen_by_all = all(everyone.gather(seen))
    if everyone.ranks.is_zero:
        probe.unlink()
    return seen_by_all
