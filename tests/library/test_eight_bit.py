"""Weights of 8 bits take what bitsandbytes' layers do; ``test_real_trainers`` has its own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.hugging_face import about
from tests.helpers.torchvision import without_torchvision
from torchtune_adaptive import TransformersStep, UsageError
from torchtune_adaptive.library.eight_bit import EightBitLinear
from torchtune_adaptive.library.trainer_parts import Adapters, adapt


def eight_bit(dtype: torch.dtype = torch.bfloat16, bias: bool = False) -> EightBitLinear:
    layer = EightBitLinear(nn.Linear(128, 96, bias=bias, dtype=dtype))
    return layer.requires_grad_(False)


def test_bytes_of_a_layer() -> None:
    layer = eight_bit(bias=True)
    held = sum(one.nbytes for one in (*layer.parameters(), *layer.buffers()))
    assert held == 96 * 128 + 4 * 96 + 2 * 96
    assert not any(one.requires_grad for one in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_and_gradients_have_the_type_of_the_inputs(dtype: torch.dtype) -> None:
    layer = eight_bit(bias=True)
    inputs = torch.randn(2, 17, 128).to(dtype).requires_grad_()
    found = layer(inputs)
    assert found.shape == (2, 17, 96) and found.dtype == dtype
    assert layer.bias is not None and layer.bias.dtype == dtype
    found.float().sum().backward()
    assert inputs.grad is not None and inputs.grad.shape == inputs.shape
    assert layer.weight.grad is None


def test_values_are_what_8_bits_say() -> None:
    layer = eight_bit(torch.float32)
    layer.weight.data.random_(-127, 128)
    layer.scales.fill_(0.5)
    assert layer.dequantized(torch.float32).equal(layer.weight.float() * 0.5 * (1 / 127))


class Model(nn.Module):
    config = SimpleNamespace(model_type="llama")

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.up, self.lm_head = layer, nn.Linear(96, 9, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def test_adapters_are_beside_it() -> None:
    model = Model(eight_bit())
    adapt(model, Adapters("all-linear", 2))
    adapted: Any = model.up
    assert isinstance(adapted.base, EightBitLinear)
    adapted(torch.randn(17, 128, dtype=torch.bfloat16)).float().sum().backward()
    assert adapted.lora_b.weight.grad is not None


def test_a_plan_has_the_bytes_of_the_weights_and_a_speed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(about("Llama", 256, 2, 4, 2, 64, 128, 512)))
    settings: dict[str, Any] = {"folder": str(tmp_path), "dtype": "bfloat16", "lora": True}
    settings |= {
        "per_device_train_batch_size": 2,
        "max_length": 32,
        "prepare_for_kbit_training": True,
    }
    with without_torchvision():
        eight, four = (
            TransformersStep(**settings, **{f"load_in_{bits}bit": True}).plan(
                ceiling=2, cache=False
            )
            for bits in (8, 4)
        )
    numbers = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3)
    outputs = 2 * (2 * 64 + 2 * 32 + 2 * 128 + 64)
    tables = 2 * 7 * 16 * 4  # of weights of 4 bits, whose scales are those of 64 weights
    saved = numbers // 2 + 4 * outputs - 4 * numbers // 64 - tables
    assert eight.parts["parameters"] - four.parts["parameters"] == saved
    assert eight.speed is not None and four.speed is not None


def test_what_is_planned_is_said() -> None:
    step = TransformersStep(folder="model", dtype="bfloat16", lora=True, load_in_8bit=True)
    assert any(
        line.startswith("linear layers: 8 bits as of bitsandbytes 0.50")
        and line.endswith("bfloat16")
        for line in step.about()
    )
    assert any("adapters: rank 8, in bfloat16 as TRL has them" in line for line in step.about())
    assert step.estimated() is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"lora": False}, "load_in_8bit: weights of 8 bits cannot be trained"),
        ({"load_in_4bit": True}, "load_in_8bit: weights have 8 bits or 4"),
        ({"fsdp": True, "ranks": 2}, "fsdp: FSDP2 cannot shard weights of 8 bits"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], complaint: str) -> None:
    settings: dict[str, Any] = {"lora": True, "load_in_8bit": True}
    with pytest.raises(UsageError, match=complaint):
        TransformersStep(folder="model", **{**settings, **changes})
