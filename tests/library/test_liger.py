"""Steps with Liger's kernels, as planned; ``test_real_trainers`` compares them with Liger's own functions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.real_trainers import SHAPE
from tests.helpers.torchvision import without_torchvision
from torchtune_adaptive.common import UsageError
from torchtune_adaptive.library import TransformersRollouts, TransformersStep
from torchtune_adaptive.library.liger_kernels import (
    CrossEntropy,
    GatedProduct,
    HeadAndCrossEntropy,
    Norm,
    Rotation,
    chunk_size,
)

ROWS, LENGTH = 4, 64
LIGER = {"use_liger_kernel": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model(tmp_path, "llama")


def model(folder: Path, kind: str) -> Path:
    shape = {"model_type": kind, **SHAPE, "num_hidden_layers": 2, "head_dim": 32}
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def peak(folder: Path, **settings: Any) -> int:
    """The peak of tensors: segments of the allocator would hide small differences."""
    rows = {"max_length": LENGTH, "per_device_train_batch_size": ROWS}
    step = TransformersStep(folder=str(folder), **{"trainer": "Trainer", **rows, **settings})
    with without_torchvision():
        return step.plan(gpu="h100", ceiling=ROWS).allocated


def data(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def test_a_norm_keeps_its_input_and_writes_over_the_gradient_that_it_gets() -> None:
    inputs = torch.zeros(2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)
    for in_place in (True, False):
        found = Norm.apply(inputs, weight, in_place)
        kept = found.grad_fn.saved_tensors
        assert data(kept[0]) == data(inputs) and kept[2].dtype == torch.float32
        grad = torch.zeros_like(found)
        of_inputs, of_weight = torch.autograd.grad(found, (inputs, weight), grad)
        assert (data(of_inputs) == data(grad)) is in_place
        assert of_inputs.shape == inputs.shape and of_weight.dtype == weight.dtype


def test_gradients_of_a_gate_and_of_a_rotation_have_the_memory_of_what_was_kept() -> None:
    gate, up = (torch.zeros(2, 3, 8, requires_grad=True) for _ in range(2))
    found = GatedProduct.apply(gate, up)
    of_gate, of_up = torch.autograd.grad(found, (gate, up), torch.zeros_like(found))
    assert (data(of_gate), data(of_up)) == (data(gate), data(up)) and of_up.shape == up.shape
    heads = torch.zeros(2, 3, 4, 8, requires_grad=True).transpose(1, 2)
    found, _ = Rotation.apply(heads, heads, torch.zeros(1, 3, 8), torch.zeros(1, 3, 8))
    assert data(found) == data(heads) and found.shape == heads.shape


def test_gradients_of_a_loss_are_there_after_the_forward_pass() -> None:
    logits = torch.zeros(6, 9, requires_grad=True)
    targets = torch.zeros(6, dtype=torch.long)
    loss = CrossEntropy.apply(logits, targets)
    assert data(torch.autograd.grad(loss, logits)[0]) == data(logits)
    hidden, weight = torch.zeros(6, 4, requires_grad=True), torch.zeros(9, 4)
    for trained in (False, True):
        loss = HeadAndCrossEntropy.apply(hidden, weight.requires_grad_(trained), targets, None)
        of_hidden, of_weight = loss.grad_fn.saved_tensors
        assert of_hidden.shape == hidden.shape and (of_weight is not None) is trained


def test_a_chunk_has_logits_of_about_the_size_of_all_hidden_states() -> None:
    # 128,256 columns of 4,096: 32 chunks or fewer, rounded up to a power of two.
    assert chunk_size(16384, 4096, 128256) == 512
    assert chunk_size(10000, 4096, 128256) == 512
    assert chunk_size(10, 4096, 100) == 10


@pytest.mark.alternating
@pytest.mark.rotating(2)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "gradient_checkpointing": True},
        {"dtype": "bfloat16", "lora": True},
        {"dtype": "bfloat16", "lora": True, "load_in_4bit": True},
        {"dtype": "bfloat16", "lora": True, "ranks": 2, "fsdp": True},
        {"trainer": "SFTTrainer", "packing": True, "gradient_checkpointing": False},
    ],
    ids=["mixed precision", "full", "checkpointing", "LoRA", "QLoRA", "FSDP2", "packed"],
)
def test_a_step_with_kernels_takes_less(folder: Path, settings: dict[str, Any]) -> None:
    assert peak(folder, **LIGER, **settings) < peak(folder, **settings)


@pytest.mark.alternating
def test_each_kernel_can_be_switched_off(folder: Path, exhaustive: bool, shard: int) -> None:
    whole = {"dtype": "bfloat16", "gradient_checkpointing": False}
    none = dict.fromkeys(("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"), False)
    plain = peak(folder, **whole)
    assert peak(folder, **whole, **LIGER, liger_kernel_config=none) == plain
    names = ("rms_norm", "swiglu", "fused_linear_cross_entropy", "cross_entropy")
    for name in names if exhaustive else [names[shard % len(names)]]:
        assert peak(folder, **whole, **LIGER, liger_kernel_config={**none, name: True}) < plain


def test_other_types_are_refused_and_other_models_keep_their_functions(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use_liger_kernel: what Liger replaces in olmo2 is not"):
        peak(model(tmp_path, "olmo2"), **LIGER)
    with pytest.raises(UsageError, match="not planned for GRPOTrainer"):
        TransformersRollouts(folder="model", trainer="GRPOTrainer", **LIGER)
    step = TransformersStep(
        folder=str(model(tmp_path, "llama")),
        trainer="Trainer",
        gradient_checkpointing=False,
        bf16=False,
        **LIGER,
    )
    with without_torchvision():
        policy = step.model()._policy()
    assert "kernels: of Liger 0.8.5 (rope, rms_norm, swiglu, fused_linear" in str(step.about())
    source = sys.modules[type(policy).__module__]
    own = source.apply_rotary_pos_emb
    tokens = torch.zeros(1, 4, dtype=torch.long)
    policy(input_ids=tokens, labels=tokens).loss.backward()
    assert source.apply_rotary_pos_emb is own
