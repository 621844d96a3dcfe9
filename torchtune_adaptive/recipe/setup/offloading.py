"""Activation offloading, as torchtune does it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
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
        return fresh
