"""Restore a run bit-for-bit: everything that a training step can change.

Trained parameters, buffers, and the optimizer's state, where there is any, are copied to host memory. Frozen
parameters cannot change and are not copied.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from torchtune_adaptive.core.device.memory import plain_tensors
from torchtune_adaptive.core.step.buffers import Buffers
from torchtune_adaptive.core.step.generator_bytes import pack_generators, unpack_generators


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


class Generators:
    """The state of every random number generator that a step or a dataset may use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python: tuple[Any, ...] = random.getstate()
        self._numpy: dict[str, Any] = np.random.get_state(legacy=False)
        self._torch = torch.get_rng_state()
        self._accelerator: torch.Tensor | None = None
        if device.type != "cpu":
            self._accelerator = torch.get_device_module(device).get_rng_state(device)

    def state_dict(self) -> dict[str, Any]:
        """The state in types that a checkpoint may hold."""
        version, words, gauss = self._python
        numpy = dict(self._numpy)
        numpy["state"] = {"key": numpy["state"]["key"].tolist(), "pos": numpy["state"]["pos"]}
        return {
            "python": [version, list(words), gauss],
            "numpy": numpy,
            "torch": self._torch,
            "accelerator": self._accelerator,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators to their state when ``state_dict`` was called."""
        version, words, gauss = state["python"]
        self._python = (version, tuple(words), gauss)
        key = np.array(state["numpy"]["state"]["key"], dtype=np.uint32)
        pos = state["numpy"]["state"]["pos"]
        self._numpy = {**state["numpy"], "state": {"key": key, "pos": pos}}
        self._torch = state["torch"]
        if self._accelerator is not None and state["accelerator"] is not None:
            self._accelerator = state["accelerator"]
        self.restore()

    def as_bytes(self) -> torch.Tensor:
        """The state as bytes: as many on each rank of a run."""
        return pack_generators(self.state_dict())

    def load_bytes(self, state: torch.Tensor) -> None:
        """Set the generators to their state when ``as_bytes`` was called."""
        self.load_state_dict(unpack_generators(state))

    @staticmethod
    def bytes_of(state: Mapping[str, Any]) -> torch.Tensor:
        """The bytes of what ``state_dict`` gave."""
        return pack_generators(state)

    def have_moved(self) -> bool:
        """Whether a random number has been drawn since."""
        before, now = self.state_dict(), Generators(self._device).state_dict()
        return any(before[name] != now[name] for name in ("python", "numpy")) or not all(
            before[name] is None or torch.equal(before[name], now[name])
            for name in ("torch", "accelerator")
        )

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._accelerator is not None:
            torch.get_device_module(self._device).set_rng_state(self._accelerator, self._device)
