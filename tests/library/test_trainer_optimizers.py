"""The optimizers that ``optim`` names hold what the published formats say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchtune_adaptive.core import DeviceMemory
from torchtune_adaptive.library.step_choices import OPTIMIZERS, about_optimizer
from torchtune_adaptive.library.trainer_optimizers import (
    make_optimizer,
    mark_embeddings,
)

ON_DEVICE = "meta"
"""Stands for a device that is not the CPU."""


def bytes_held(name: str, model: nn.Module) -> int:
    """Bytes of what an optimizer keeps after two steps, tables included once."""
    optimizer = make_optimizer(name, [{"params": [*model.parameters()]}])
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    storages = {
        id(plain.untyped_storage()): plain.untyped_storage()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
        for plain in DeviceMemory.plain_tensors(value)
    }
    return sum(storage.nbytes() for storage in storages.values())


def linear(rows: int, columns: int, **more: Any) -> nn.Module:
    return nn.Linear(columns, rows, bias=False, **more)


TABLES = 2 * 256 * 4


@pytest.mark.parametrize(
    ("shape", "held"),
    [
        ((4095, 1), 2 * 4 * 4095),  # too small for 8 bits
        ((4096, 1), 2 * (4096 + 4 * 16) + TABLES),
        ((4097, 3), 2 * (12291 + 4 * 49) + TABLES),  # the last block has 3 elements
    ],
)
def test_8_bit_moments(shape: tuple[int, int], held: int) -> None:
    assert bytes_held("adamw_8bit", linear(*shape, dtype=torch.bfloat16)) == held


def test_tables_are_shared_and_embeddings_have_32_bits() -> None:
    model = nn.Sequential(nn.Embedding(64, 64), linear(64, 64), linear(64, 64))
    eight = 2 * (4096 + 4 * 16)
    assert bytes_held("adamw_8bit", model) == 3 * eight + TABLES
    mark_embeddings(model)
    model(torch.zeros(1, dtype=torch.long))
    assert bytes_held("adamw_8bit", model) == 2 * eight + TABLES + 2 * 4 * 4096


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("paged_adamw_32bit", 2 * 4 * 50_000),
        ("paged_adamw_8bit", 2 * (50_000 + 4 * 196) + 2 * 4 * 782 + TABLES),
    ],
)
def test_large_moments_are_paged_on_a_device_only(name: str, held: int) -> None:
    with torch.device(ON_DEVICE):
        assert bytes_held(name, nn.Sequential(linear(500, 100), linear(500, 400))) == held
    plain = nn.Sequential(linear(500, 100), linear(500, 400))
    large = 2 * 200_000 * (4 if "32" in name else 1)
    assert bytes_held(name, plain) == held + large


def test_second_moments_of_matrices_are_factored() -> None:
    pytest.importorskip("transformers")
    model = nn.Sequential(linear(300, 200, dtype=torch.bfloat16), nn.LayerNorm(300))
    numbers = 3  # the mean square of each tensor
    assert bytes_held("adafactor", model) == 4 * (300 + 200 + 2 * 300 + numbers)


def test_every_optimizer_is_described() -> None:
    for name in OPTIMIZERS:
        assert about_optimizer(name).startswith(name)
    assert "not in the peak" in about_optimizer("paged_adamw_8bit")
    assert "bitsandbytes" not in about_optimizer("adafactor")
