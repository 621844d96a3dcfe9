"""Weights of 4 bits take what the published format says; ``test_real_trainers`` has bitsandbytes' own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchtune_adaptive.library.four_bit import FourBitLinear, prepare, quantize
from torchtune_adaptive.library.trainer_parts import Adapters, Autocast, adapt


def held(module: nn.Module) -> int:
    return sum(one.nbytes for one in (*module.parameters(), *module.buffers()))


def four_bit(rows: int, columns: int, double: bool, bias: bool = False) -> FourBitLinear:
    like = nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16)
    return FourBitLinear(like, torch.bfloat16, double)


@pytest.mark.parametrize(
    ("double", "of_scales"),
    [(False, 4 * 192), (True, 192 + 4)],  # the 192 scales are one block, and have their own scale
)
def test_bytes_of_a_layer(double: bool, of_scales: int) -> None:
    layer = four_bit(96, 128, double)
    table, mean = 16 * 4, 4
    assert held(layer) == 96 * 128 // 2 + of_scales + table + mean * double


def test_bits_of_a_large_weight() -> None:
    """4.5 bits for each parameter, and 4.127 with double quantization: what QLoRA's paper says."""
    for double, bits in ((False, 4.5), (True, 4.127)):
        with torch.device("meta"):
            assert held(four_bit(4096, 4096, double)) * 8 / 4096**2 == pytest.approx(bits, abs=1e-3)


class Model(nn.Module):
    config = SimpleNamespace(model_type="llama")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(8, dtype=torch.bfloat16)
        self.up = nn.Linear(8, 16, dtype=torch.bfloat16)
        self.lm_head = nn.Linear(16, 9, bias=False, dtype=torch.bfloat16)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def quantized(targets: Any = "all-linear", dtype: torch.dtype = torch.float32) -> Model:
    model = Model()
    quantize(model, torch.bfloat16, double=True)
    prepare(model)
    adapt(model, Adapters(targets, 2, dtype=dtype))
    return model


def test_all_but_the_head_has_4_bits_and_the_rest_32() -> None:
    model = quantized()
    assert isinstance(model.up.base, FourBitLinear) and model.up.base.weight.dtype == torch.uint8
    for tensor in (model.embed.weight, model.norm.weight, model.up.base.bias, model.lm_head.weight):
        assert tensor.dtype == torch.float32 and not tensor.requires_grad


def test_results_have_the_type_of_inputs_and_gradients_flow() -> None:
    model = quantized()
    inputs = torch.zeros(3, 8, requires_grad=True)
    found = model.up(inputs)
    assert found.dtype == torch.float32 and found.shape == (3, 16)
    found.sum().backward()
    assert inputs.grad is not None and model.up.lora_b.weight.grad is not None
    assert model.up.base.bias.grad is None


def test_inputs_of_adapters_are_cast_unless_autocast_does_it() -> None:
    """PEFT asks torch whether autocast is on, which means: on a GPU."""
    made: list[torch.dtype] = []
    for device, expected in (("cpu", torch.float32), ("meta", torch.bfloat16)):
        with torch.device(device):
            model = quantized()
            model.up.dropout.register_forward_pre_hook(lambda _, given: made.append(given[0].dtype))
            with Autocast():
                assert model.up(torch.zeros(3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert made.pop() == expected
