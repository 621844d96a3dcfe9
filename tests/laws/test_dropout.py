"""What dropout by sample keeps and takes, in bytes and operations: nothing that grows with a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.core.step.sample_dropout import SampleDropout, drop_in_parts


def saved_bytes(layer: nn.Module, rows: torch.Tensor) -> int:
    saved: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        layer(rows.requires_grad_())
    return sum(saved)


def test_nothing_is_kept_but_the_keys_of_rows() -> None:
    for rows, length in ((1, 8), (4, 8), (4, 1024)):
        layer = SampleDropout(0.1, drop_in_parts)
        assert saved_bytes(layer, torch.ones(rows, length, 64)) == 8 * rows
    assert saved_bytes(nn.Dropout(0.1), torch.ones(4, 1024, 64)) >= 4 * 1024 * 64


def peak_bytes(layer: nn.Module, rows: torch.Tensor) -> int:
    """What forward and backward take at most, besides the rows."""
    memory = SimulatedMemory(1 << 40)
    with memory.running():
        out = layer(rows.requires_grad_())
        out.backward(torch.ones_like(rows))
    return memory.usage().peak_bytes


@pytest.mark.parametrize("shape", [(1, 4096, 256), (8, 512, 256), (64, 16384)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_no_more_than_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = torch.ones(shape, dtype=dtype)
    ours = peak_bytes(SampleDropout(0.1, drop_in_parts), rows)
    torchs = peak_bytes(nn.Dropout(0.1), rows.detach())
    assert ours <= torchs


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(length: int) -> int:
    layer, rows = SampleDropout(0.1, drop_in_parts), torch.ones(8, length, 256)
    with Operations() as seen:
        layer(rows)
    return seen.count


def test_parts_do_not_grow_in_number_for_ever() -> None:
    assert operations(8) < operations(512) == operations(4096)
