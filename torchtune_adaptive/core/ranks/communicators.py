"""The communicators of process groups, each of which NCCL makes at the first collective of its group."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist

from torchtune_adaptive.common import TrainingOutOfMemory
from torchtune_adaptive.core.private import groups_here

# What NCCL and RCCL say when they find no memory for a communicator; the rest is torch's and differs.
_NO_MEMORY_TEXTS = (
    "Failed to CUDA calloc",
    "Failed to CUDA malloc",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
    "HIP failure 'out of memory'",
    "HIP failure: 'out of memory'",
)


def connect(groups: Collection[dist.ProcessGroup], number: torch.Tensor) -> None:
    """Make the communicators of groups by one collective each: beside what a full step leaves in the cache,
    NCCL may find no memory.

    Args:
        groups: those of this rank; each of its ranks calls this with it.
        number: a tensor on the device, which takes no other one.

    Raises:
        TrainingOutOfMemory: there is no memory for one.
    """
    for group in groups_here():  # in this order on all ranks, so that none waits
        if group in groups:
            try:
                dist.all_reduce(number.zero_(), group=group)
            except RuntimeError as error:
                if shortage := of_communicator(error):
                    raise shortage from error
                raise


def of_communicator(error: BaseException) -> TrainingOutOfMemory | None:
    """The error of a rank on which NCCL found no memory for a communicator, if this is one."""
    if not isinstance(error, RuntimeError) or not any(t in str(error) for t in _NO_MEMORY_TEXTS):
        return None
    *_, detail = str(error).strip().splitlines()
    return TrainingOutOfMemory(
        "NCCL found no memory for a communicator, beside what torch holds. Leave it some: use a larger "
        f"headroom, a memory_limit or a smaller size, or lower NCCL_BUFFSIZE. ({detail})",
        everywhere=False,
    )
