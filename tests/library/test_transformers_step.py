"""What the trainers of transformers and TRL add to a model, as planned; ``test_real_trainers`` has those."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchtune_adaptive.common import NoPrediction, UsageError, tested_versions
from torchtune_adaptive.common.tested_versions import PLANNED
from torchtune_adaptive.library import (
    TransformersRollouts,
    TransformersStep,
    transformers_step,
)
from torchtune_adaptive.library.trainer_parts import (
    Adapted,
    Adapters,
    Autocast,
    TiledLogProbs,
    adapt,
    without_adapters,
)


def step(**settings: Any) -> TransformersStep:
    return TransformersStep(folder="model", **settings)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"trainer": "GRPOTrainer"}, "trainer: 'GRPOTrainer' must be one of: 'SFTTrainer'"),
        ({"dtype": "int8"}, "dtype: 'int8' must be one of: 'float32', 'bfloat16', 'float16'"),
        ({"fp16": True, "bf16": True}, "fp16: the model computes in one type"),
        (
            {"fp16": True, "dtype": "float16"},
            "dtype: gradients of weights in float16 cannot be scaled",
        ),
        ({"optim": "lomo"}, "optim: 'lomo' must be one of: 'adamw_torch_fused'"),
        (
            {"packing": True, "trainer": "Trainer"},
            "packing: what is packed is SFTTrainer's, not Trainer's",
        ),
        ({"packing": True, "padded": True}, "packing: what is packed has no padding"),
        (
            {"padding_free": True, "trainer": "Trainer"},
            "padding_free: one row of all is SFTTrainer's, not Trainer's",
        ),
        ({"padding_free": True, "padded": True}, "padding_free: one row of all has no padding"),
        (
            {"padding_free": True, "trainer": "DPOTrainer"},
            "padding_free: DPOTrainer of TRL 1.16 does not do it",
        ),
        (
            {"packing": True, "bf16": False},
            "packing: FlashAttention, .* has no kernels for float32",
        ),
        (
            {"load_in_4bit": True},
            "load_in_4bit: weights of 4 bits cannot be trained. Set lora=True",
        ),
        (
            {"load_in_4bit": True, "lora": True, "fsdp": True, "ranks": 2}
            | {"bnb_4bit_quant_storage": "float16"},
            "bnb_4bit_quant_storage: .* to bfloat16, .* Set bnb_4bit_quant_storage=bfloat16",
        ),
        ({"optim": "adafactor", "fsdp": True, "ranks": 2}, "fsdp: adafactor cannot update"),
        (
            {"use_liger_kernel": True, "liger_kernel_config": {"layer_norm": True}},
            "liger_kernel_config: .* must be true or false for some of rope",
        ),
        (
            {"trainer": "Trainer", "liger_kernel_config": {"cross_entropy": True}},
            "liger_kernel_config: cross_entropy and fused_linear_cross_entropy exclude each other",
        ),
        (
            {"liger_kernel_config": {"fused_linear_cross_entropy": True}},
            "liger_kernel_config: fused_linear_cross_entropy replaces the head, which TRL",
        ),
        ({"bf16": "yes"}, "bf16: 'yes' must be one of: None, True, False"),
        ({"r": 0}, "r: 0 must be a whole number"),
        ({"max_length": "1k"}, "max_length: '1k' must be a whole number"),
        ({"lora_dropout": 1.0}, "lora_dropout: 1.0 must be a share"),
        ({"trainer": "DPOTrainer", "fsdp": True, "ranks": 2}, "fsdp: two sharded models"),
        (
            {"experts_implementation": "sonicmoe"},
            "experts_implementation: 'sonicmoe' must be one of: None, 'grouped_mm', 'batched_mm', 'eager'",
        ),
        ({"router_aux_loss_coef": -1}, "router_aux_loss_coef: -1 must be a number, 0 or more"),
        (
            {"trainer": "Trainer", "router_aux_loss_coef": 0.1},
            "router_aux_loss_coef: Trainer has no such argument. Set output_router_logits=True",
        ),
        (
            {"output_router_logits": True},
            "output_router_logits: SFTTrainer decides by router_aux_loss_coef",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        step(**settings)


def test_without_transformers_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_step, "find_spec", lambda name: None)
    with pytest.raises(NoPrediction, match="pip install transformers"):
        step().plan(gpu="cpu", memory="1GiB")


def test_a_pair_is_two_rows() -> None:
    assert step(max_length=8).model().batch(3)["input_ids"].shape == (3, 8)
    assert step(max_length=8, trainer="DPOTrainer").model().batch(3)["input_ids"].shape == (6, 8)


@pytest.mark.parametrize("how", ["packing", "padding_free"])
def test_packed_rows_are_one(how: str) -> None:
    packed = step(max_length=8, **{how: True}).model().batch(3)
    assert packed["input_ids"].shape == packed["position_ids"].shape == (1, 24)
    assert packed["cu_seq_lens"].dtype == torch.int32 and len(packed["cu_seq_lens"]) == 4
    assert "attention_mask" not in packed


def test_adapters_are_in_fp32_and_named_layers_get_them() -> None:
    class Model(nn.Module):
        config = SimpleNamespace(model_type="llama")

        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
            self.up_proj = nn.Linear(6, 4, bias=False, dtype=torch.bfloat16)
            self.lm_head = nn.Linear(4, 9, bias=False, dtype=torch.bfloat16)

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

    model = Model()
    with pytest.raises(
        UsageError, match=r"k_proj is not among .* some of q_proj, up_proj, or all-"
    ):
        adapt(model, Adapters(["k_proj"], 2))
    adapt(model, Adapters(["q_proj"], 2))
    assert isinstance(model.q_proj, Adapted) and isinstance(model.up_proj, nn.Linear)
    trained = [one for one in model.parameters() if one.requires_grad]
    assert [one.dtype for one in trained] == [torch.float32] * 2
    inputs = torch.randn(3, 4, dtype=torch.bfloat16)
    assert model.q_proj(inputs).dtype == torch.bfloat16
    with without_adapters(model):
        assert not model.q_proj(inputs).requires_grad
    assert model.q_proj(inputs).requires_grad


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_computes_as_torchs(half: torch.dtype) -> None:
    """With torch's own on the CPU, which has one; gradients as well."""
    torch.manual_seed(0)
    layer, inputs = nn.Linear(8, 8), torch.randn(5, 8)

    def run(mode: Any) -> tuple[torch.Tensor, ...]:
        layer.zero_grad()
        with mode:
            other = torch.float16 if half == torch.bfloat16 else torch.bfloat16
            hidden = layer(inputs.to(other)) @ layer.weight.t()
            out = F.scaled_dot_product_attention(*(hidden.float()[None, None] for _ in range(3)))
        out.float().square().sum().backward()
        return hidden, out, layer.weight.grad.clone()

    attention = F.scaled_dot_product_attention
    ours, torchs = run(Autocast(half)), run(torch.autocast("cpu", half))
    for one, other in zip(ours, torchs, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert F.scaled_dot_product_attention is attention


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_leaves_a_softmax_the_type_that_it_is_given(half: torch.dtype) -> None:
    """As torch's on CUDA; the one of the CPU has no rule for softmax."""
    scores = torch.randn(2, 3, dtype=half)
    with Autocast(half):
        assert F.softmax(scores, dim=-1).dtype == torch.float32
        for told in (half, torch.float32):
            assert F.softmax(scores, dim=-1, dtype=told).dtype == told
            assert scores.softmax(-1, dtype=told).dtype == told


def test_casts_are_kept_as_long_as_torch_keeps_them() -> None:
    trained, frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    inputs = torch.randn(2, 4)

    def kept(mode: Autocast) -> int:
        with mode, torch.no_grad():
            for layer in (trained, frozen, trained):
                layer(inputs)
            number = len(mode._casts)
        assert not mode._casts
        return number

    assert kept(Autocast()) == 2  # a weight and a bias
    assert kept(Autocast(keeps_all=True)) == 4


def test_the_head_has_a_gradient_for_all_it_is_given() -> None:
    hidden = torch.randn(5, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(9, 4, requires_grad=True)
    labels = torch.zeros(5, dtype=torch.long)
    found = TiledLogProbs.apply(hidden, weight, labels, torch.bfloat16)
    assert found.shape == (5,) and found.dtype == torch.float32
    found.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16 and weight.grad.shape == (9, 4)


def test_it_says_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_step, "version", lambda name: "5.23.0")
    text = "\n".join(step(trainer="DPOTrainer", lora=True, ranks=2, fsdp=True).about())
    for said in (
        "DPOTrainer as of TRL",
        "weights in float32, computing in bfloat16",
        "every layer",
    ):
        assert said in text
    for said in ("rank 8, in float32", "the model without adapters", "FSDP2 as accelerate"):
        assert said in text


def test_it_says_how_4_bits_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_step, "version", lambda name: "5.23.0")
    qlora = {"lora": True, "load_in_4bit": True, "dtype": "bfloat16"}
    text = "\n".join(step(**qlora, bnb_4bit_use_double_quant=True).about())
    assert "with double quantization, computing in bfloat16; the rest is in bfloat16" in text
    assert "rank 8, in bfloat16 as TRL has them" in text
    text = "\n".join(step(**qlora, trainer="Trainer", bnb_4bit_compute_dtype="float32").about())
    assert "without double quantization, computing in float32; the rest is in float32, as" in text
    assert "rank 8, in float32 as PEFT 0.21 has them" in text


def test_it_says_which_versions_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {name: f"{version}.9" for name, version in PLANNED.items()}
    monkeypatch.setattr(transformers_step, "version", here.get)
    monkeypatch.setattr(tested_versions, "versions_of", lambda *names: {n: here[n] for n in names})
    usual = step(lora=True).about()
    assert usual[-1] == "installed: transformers 5.23.9, trl 1.16.9, peft 0.21.9"
    here |= {"trl": "1.17.0.dev0", "peft": None}
    assert step(lora=True).about()[-2:] == (
        "installed: transformers 5.23.9, trl 1.17.0.dev0, peft none",
        "WARNING: no plan was compared with trl 1.17.0.dev0: the step is that of trl 1.16",
    )
    assert step(trainer="Trainer", bf16=True).about()[-1] == "installed: transformers 5.23.9"
    eight = step(optim="adamw_8bit", ranks=2, fsdp=False).about()
    assert "installed: transformers 5.23.9, trl 1.17.0.dev0, bitsandbytes 0.50.9" in eight
    sharded = step(ranks=2, fsdp=True).about()
    assert any("accelerate 1.15.9" in line for line in sharded)


def test_pages_name_the_versions_that_plans_were_compared_with() -> None:
    with_versions = TransformersStep.STEPS["SFTTrainer"], TransformersRollouts.STEPS["GRPOTrainer"]
    assert all(f"TRL {PLANNED['trl']}" in text for text in with_versions)
