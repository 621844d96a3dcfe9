"""Host memory as a limit: what activations that are offloaded to it may take.

A machine, or a container, that runs out of host memory ends processes without a word. So its ranks stop
before: offloading fails as the device's allocator does, with an error that a step survives and a trial takes
for a size that does not fit.
"""

from __future__ import annotations

import functools
from typing import Any

import psutil
import torch

from torchtune_adaptive.common import counted, launcher
from torchtune_adaptive.recipe.setup.cgroups import limiting_groups

_RESERVE = 0.05  # of all memory, for everything that is not offloaded
_NOTICED = 1 << 20  # smaller tensors are not worth a look at the machine
_limiting_groups = functools.cache(limiting_groups)


def bound_by_host_memory(offloading: Any) -> Any:
    """Make ``offloading`` (torchtune's ``OffloadActivations``, in place) fail before host memory ends."""
    pack = offloading.pack_hook

    def pack_if_there_is_room(tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, torch.nn.Parameter):  # those stay where they are
            check_host_memory(tensor.nbytes)
        return pack(tensor)

    offloading.pack_hook = pack_if_there_is_room
    return offloading


def check_host_memory(nbytes: int) -> None:
    """Check that every rank of this machine can pin ``nbytes`` more.

    Raises:
        torch.OutOfMemoryError: they cannot.
    """
    if nbytes < _NOTICED:
        return
    # The allocator of pinned memory rounds up to powers of two.
    pinned = 1 << (nbytes - 1).bit_length()
    ranks = launcher.local_size()
    for memory in (psutil.virtual_memory(), *_limiting_groups()):
        if memory.available - pinned * ranks < _RESERVE * memory.total:
            raise torch.OutOfMemoryError(
                f"host memory: offloading an activation would pin {pinned:,} bytes on each of "
                f"{counted(ranks, 'rank')}, and {memory.available:,} of {memory.total:,} "
                f"bytes are available, {_RESERVE:.0%} of which stay free"
            )
