"""The random number generators of a rank: their state, also as bytes, which checkpoints have of all ranks."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torchtune_adaptive.core.step.trees import mapped

_KIND = "MT19937"
_HEAD = struct.Struct("<626IBd625IBdII")
"""Of Python's generator and of numpy's: the words, whether one of two normal numbers is kept, and which. Then
the lengths of torch's state and of the accelerator's, which follow."""


class Generators:
    """The state of every random number generator that a step or a dataset may use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "accelerator": None,
        }
        if device.type != "cpu":
            accelerator = torch.get_device_module(device).get_rng_state(device)
            self.state["accelerator"] = accelerator

    def as_bytes(self) -> torch.Tensor:
        """The state as bytes: as many on each rank of a run."""
        return self.bytes_of(self.state)

    @staticmethod
    def bytes_of(state: Mapping[str, Any]) -> torch.Tensor:
        """The bytes of a state that is a dictionary, as version 0.1.0 wrote it."""
        (version, words, normal), numpy = state["python"], state["numpy"]
        if numpy["bit_generator"] != _KIND:
            raise ValueError(f"numpy's generator is {numpy['bit_generator']}, not {_KIND}")
        of_torch, accelerator = state["torch"], state["accelerator"]
        others = [of_torch, of_torch[:0] if accelerator is None else accelerator]
        head = _HEAD.pack(
            *(version, *words, normal is not None, normal or 0.0),
            *(*numpy["state"]["key"], numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]),
            *map(len, others),
        )
        return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *others])

    def load_bytes(self, state: torch.Tensor) -> None:
        """Set the generators to their state when ``as_bytes`` was called."""
        *head, in_torch, on_accelerator = _HEAD.unpack(state[: _HEAD.size].numpy().tobytes())
        version, *words, has_normal, normal = head[:628]
        *key, place, has_gauss, gauss = head[628:]
        lengths = [_HEAD.size, in_torch, on_accelerator]
        _, self.state["torch"], accelerator = (part.clone() for part in state.split(lengths))
        self.state["python"] = version, tuple(words), normal if has_normal else None
        self.state["numpy"] = {
            "bit_generator": _KIND,
            "state": {"key": np.array(key, dtype=np.uint32), "pos": place},
            "has_gauss": has_gauss,
            "gauss": gauss,
        }
        if self.state["accelerator"] is not None and on_accelerator:
            self.state["accelerator"] = accelerator
        self.restore()

    def have_moved(self) -> bool:
        """Whether a random number has been drawn since."""
        before, now = (mapped(_listed, each.state) for each in (self, Generators(self._device)))
        return bool(before != now)

    def restore(self) -> None:
        """Set the generators to this state."""
        random.setstate(self.state["python"])
        np.random.set_state(self.state["numpy"])
        torch.set_rng_state(self.state["torch"])
        if (accelerator := self.state["accelerator"]) is not None:
            torch.get_device_module(self._device).set_rng_state(accelerator, self._device)


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value
