"""The states of random number generators as bytes: a checkpoint has those of all ranks, in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_KIND = "MT19937"
_HEAD = np.dtype(
    [
        ("python_version", "<u4"),
        ("python_words", "<u4", 625),
        ("python_has_gauss", "u1"),
        ("python_gauss", "<f8"),
        ("numpy_words", "<u4", 624),
        ("numpy_place", "<u4"),
        ("numpy_has_gauss", "u1"),
        ("numpy_gauss", "<f8"),
        ("torch_bytes", "<u4"),
        ("accelerator_bytes", "<u4"),
    ]
)
"""What comes first. torch's bytes follow, and those of its generator on the accelerator, if there are any."""


def pack_generators(state: Mapping[str, Any]) -> torch.Tensor:
    """The bytes of what ``Generators.state_dict`` gives: of ranks of one run, as many on each."""
    version, words, gauss = state["python"]
    numpy, parts = state["numpy"], [state["torch"]]
    if state["accelerator"] is not None:
        parts.append(state["accelerator"])
    if numpy["bit_generator"] != _KIND:
        raise ValueError(f"numpy's generator is {numpy['bit_generator']}, not {_KIND}")
    head = np.zeros((), dtype=_HEAD)
    head["python_version"], head["python_words"] = version, words
    head["python_has_gauss"], head["python_gauss"] = gauss is not None, gauss or 0.0
    head["numpy_words"], head["numpy_place"] = numpy["state"]["key"], numpy["state"]["pos"]
    head["numpy_has_gauss"], head["numpy_gauss"] = numpy["has_gauss"], numpy["gauss"]
    head["torch_bytes"], head["accelerator_bytes"] = len(parts[0]), sum(map(len, parts[1:]))
    return torch.cat([torch.from_numpy(np.frombuffer(head.tobytes(), np.uint8).copy()), *parts])


def unpack_generators(packed: torch.Tensor) -> dict[str, Any]:
    """What ``pack_generators`` was given."""
    data = packed.contiguous()
    head = np.frombuffer(data[: _HEAD.itemsize].numpy().tobytes(), dtype=_HEAD)[0]
    in_torch, on_accelerator = int(head["torch_bytes"]), int(head["accelerator_bytes"])
    _, torch_state, accelerator = data.split([_HEAD.itemsize, in_torch, on_accelerator])
    gauss = float(head["python_gauss"]) if head["python_has_gauss"] else None
    return {
        "python": [int(head["python_version"]), head["python_words"].tolist(), gauss],
        "numpy": {
            "bit_generator": _KIND,
            "state": {"key": head["numpy_words"].tolist(), "pos": int(head["numpy_place"])},
            "has_gauss": int(head["numpy_has_gauss"]),
            "gauss": float(head["numpy_gauss"]),
        },
        "torch": torch_state.clone(),
        "accelerator": accelerator.clone() if on_accelerator else None,
    }
