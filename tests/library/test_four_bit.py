"""Weights of 4 bits take what the published format says; ``test_real_trainers`` has bitsandbytes' own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.torchvision import without_torchvision
from torchtune_adaptive import TransformersStep
from torchtune_adaptive.library.four_bit import FourBitLinear
from torchtune_adaptive.library.quantized import prepare, quantize
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


def test_what_looks_like_numbers_has_as_many_bytes() -> None:
    like = nn.Linear(129, 3, bias=False, dtype=torch.bfloat16)  # 194 bytes, which 4 do not divide
    for storage, numbers in ((torch.uint8, 194), (torch.bfloat16, 97), (torch.float32, 49)):
        weight = FourBitLinear(like, torch.bfloat16, False, storage).weight
        assert weight.dtype == storage and weight.shape == (numbers, 1)


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
    quantize(model, lambda layer: FourBitLinear(layer, torch.bfloat16, True))
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


def test_weights_of_4_bits_are_not_prepared() -> None:
    model = Model()
    quantize(model, lambda layer: FourBitLinear(layer, torch.bfloat16, True, torch.bfloat16))
    prepare(model)
    assert model.up.weight.dtype == torch.bfloat16 and model.up.weight.shape == (32, 1)
    assert model.norm.weight.dtype == torch.float32


LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.exhaustive
def test_ranks_share_what_fsdp_can_shard(tmp_path: Path) -> None:
    """As accelerate does, FSDP2 leaves bytes alone: they are whole on each rank."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    qlora = {"dtype": "bfloat16", "lora": True, "load_in_4bit": True}

    def parameters(**settings: Any) -> int:
        step = TransformersStep(
            folder=str(tmp_path),
            per_device_train_batch_size=2,
            max_length=16,
            ranks=2,
            **qlora,
            **settings,
        )
        return step.plan(gpu="cpu", memory="1GiB", ceiling=2, cache=False).parts["parameters"]

    with without_torchvision():
        whole = parameters(fsdp=True)
        shared = parameters(fsdp=True, bnb_4bit_quant_storage="bfloat16")
        copied = parameters(bnb_4bit_quant_storage="bfloat16")
    packed = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3) // 2
    assert whole - shared == packed // 2
    assert copied > whole  # the rest is shared
