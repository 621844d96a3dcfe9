"""Activation offloading, as torchtune does it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from torch import nn
from torchtune import training
from torchtune.training import OffloadActivations

from torchtune_adaptive.recipe.setup.host_memory import bound_by_host_memory


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
