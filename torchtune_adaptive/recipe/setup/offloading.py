"""Activation offloading, as torchtune does it, with host memory as a limit.

A machine, or a container, that runs out of host memory ends processes without a word. So its ranks stop
before: offloading fails as the device's allocator does, with an error that a step survives and a trial takes
for a size that does not fit.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import psutil
import torch
from torch import nn
from torchtune import training
from torchtune.training import OffloadActivations

from torchtune_adaptive.common import counted, launcher
from torchtune_adaptive.recipe.setup.cgroups import limiting_groups

_RESERVE = 0.05  # of all memory, for everything that is not offloaded
_NOTICED = 1 << 20  # smaller tensors are not worth a look at the machine
_limiting_groups = functools.cache(limiting_groups)


class Offloading:
    """Makes what forward passes of a model run in; each new context remembers nothing of a failed step.

    Args:
        model: the model whose activations are moved to the host.
        enabled: True if they are; can be changed between steps.
    """

    def __init__(self, model: nn.Module, enabled: bool) -> None:
        self.enabled = enabled
        self._model = model
        self._first: OffloadActivations | None = None

    def __call__(self) -> AbstractContextManager[Any]:
        if not self.enabled:
            return nullcontext()
        if self._first is None:  # also keeps the model's last projection from being offloaded
            self._first = training.get_act_offloading_ctx_manager(self._model, True)
        fresh: OffloadActivations = bound_by_host_memory(OffloadActivations())
        if self._first.use_streams:
            fresh.s1 = self._first.s1  # another stream would be another pool of cached memory
        return _ErrorsOfTheModel(fresh)


class _ErrorsOfTheModel(AbstractContextManager[Any]):
    """``offloading``, out of which the model's errors come as they are.

    torchtune's hooks suspend offloading before the last projection and resume it after. If that layer is
    sharded by itself (``custom_sharded_layers``), gathering it may fail before the first of them. Then the
    second ends offloading, and ending it once more raises an assertion of torch.
    """

    def __init__(self, offloading: OffloadActivations) -> None:
        self._offloading = offloading

    def __enter__(self) -> None:
        self._offloading.__enter__()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        with suppress(RuntimeError) if error is not None else nullcontext():
            self._offloading.__exit__(kind, error, traceback)


def bound_by_host_memory(offloading: Any) -> Any:
    """Make ``offloading`` (torchtune's, in place) fail before host memory ends."""
    pack = offloading.pack_hook

    def pack_if_there_is_room(tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, nn.Parameter):  # those stay where they are
            check_host_memory(tensor.nbytes)
        return pack(tensor)

    offloading.pack_hook = pack_if_there_is_room
    return offloading


def check_host_memory(nbytes: int) -> None:
    """Raise ``torch.OutOfMemoryError`` unless every rank of this machine can pin ``nbytes`` more."""
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
