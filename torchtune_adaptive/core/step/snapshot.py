"""Restore a run bit-for-bit: everything that a training step can change.

Trained parameters, buffers, and the optimizer's state, where there is any, are copied to host memory. Frozen
parameters cannot change and are not copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchtune_adaptive.core.device.memory import plain_tensors
from torchtune_adaptive.core.step.buffers import Buffers
from torchtune_adaptive.core.step.generators import Generators


class Snapshot:
    """A copy of a model, its optimizers, and the random number generators, to restore them from; and of the
    buffers of ``others``, which run besides."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        others: Sequence[nn.Module] = (),
    ) -> None:
        self._optimizers = [_OptimizerSnapshot(optimizer) for optimizer in optimizers]
        self._parameters = _Copies(p for p in model.parameters() if p.requires_grad)
        self._buffers = Buffers(model, *others)
        self._generators = Generators(device)

    def restore(self) -> None:
        """Restore everything, except that a fresh optimizer keeps its new state, and so the memory that it
        takes, as it does between the steps of a run."""
        self._parameters.restore()
        self._buffers.restore()
        for optimizer in self._optimizers:
            optimizer.restore()
        self._generators.restore()

    def close(self) -> None:
        """Restore everything, and drop the state of optimizers that had none."""
        self.restore()
        for optimizer in self._optimizers:
            optimizer.forget_new_state()


class _Copies:
    """Host copies of tensors, sharded and quantized ones included."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._copies = [
            (tensor, [plain.detach().to("cpu", copy=True) for plain in plain_tensors(tensor)])
            for tensor in tensors
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, copies in self._copies:
            # Looked up again: FSDP's first forward may give a parameter a different shard tensor.
            for plain, saved in zip(plain_tensors(tensor), copies, strict=True):
                plain.copy_(saved)


class _OptimizerSnapshot:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._fresh = not optimizer.state
        self._state = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._tensors = _Copies(
            value
            for values in (*self._state.values(), *self._groups)
            for value in values.values()
            if isinstance(value, torch.Tensor)
        )

    def restore(self) -> None:
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(saved)
        if not self._fresh:
            self._optimizer.state.update({p: dict(state) for p, state in self._state.items()})
        self._tensors.restore()

    def forget_new_state(self) -> None:
        if not self._fresh:
            return
        for parameter, state in list(self._optimizer.state.items()):
            if any(getattr(value, "is_paged", False) for value in state.values()):
                _reset_paged(state)
            else:
                del self._optimizer.state[parameter]


@torch.no_grad()
def _reset_paged(state: dict[str, Any]) -> None:
    """Make the paged state of a bitsandbytes optimizer what it is before the first step.

    Its memory is never freed (the optimizer keeps a list of it), so dropping the state would leave a second
    copy behind. What it starts from is zero, apart from the quantization maps.
    """
    state["step"] = 0
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and not name.startswith("qmap"):
            value.zero_()
