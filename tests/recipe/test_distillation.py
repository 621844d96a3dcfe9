"""Distillation trains like torchtune's recipe, once that one's gradients have the right size."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torchtune import training

from tests.helpers.recipes import run_torchtunes
from tests.helpers.runs import Record, Records, assert_torchtunes, refused
from torchtune_adaptive.recipe import tiny

pytestmark = pytest.mark.runs

SMALL: dict[str, Any] = {
    "batch_size": 2,
    "optimizer._component_": "torch.optim.SGD",  # AdamW would hide the size of gradients
    "optimizer.lr": 10.0,
    "lr_scheduler.num_warmup_steps": 0,
    "kd_ratio": 0.3,
}
UNIFORM: dict[
    str, Any
] = {  # each rank has as many tokens: torchtune takes the mean of the ranks' means
    "dataset.train_on_input": True,
    "tokenizer.max_seq_len": 12,  # no row is as short
}


def run_torchtunes_corrected(kind: str, cfg: Any) -> Records:
    """It backpropagates the mean loss and then divides gradients by the number of tokens once more."""
    training.scale_grads = lambda model, scaler: None
    return run_torchtunes(kind, cfg)


def assert_same_losses(their: Record, our: Record) -> None:
    assert our["lr"] == their["lr"]
    for name in ("loss", "class_loss", "kd_loss"):
        exactly = their["step"] == 1
        assert our[name] == pytest.approx(their[name], rel=1e-7 if exactly else 1e-4), name


def assert_same_rates(their: Record, our: Record) -> None:
    """Of several ranks torchtune logs what rank 0 has seen, we the mean over all."""
    assert our["lr"] == their["lr"]


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({}, 1),
        pytest.param(UNIFORM, 2, marks=pytest.mark.exhaustive),
        pytest.param({"enable_activation_checkpointing": True}, 1, marks=pytest.mark.exhaustive),
    ],
    ids=["one rank", "two ranks", "checkpointed"],
)
def test_training_is_torchtunes(changes: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    ours = assert_torchtunes(
        *("kd", tmp_path, {**SMALL, **changes}, ranks),
        run_theirs=run_torchtunes_corrected,
        assert_same=assert_same_losses if ranks == 1 else assert_same_rates,
        rtol=1e-3,
        atol=1e-5,
    )
    assert abs(ours[-1]["loss"] - ours[0]["loss"]) > 1e-3


def test_models_must_have_the_same_vocabulary(tmp_path: Path) -> None:
    checkpoint = made_with_vocabulary(tmp_path / "teacher", 500)
    changes = {"teacher_model.vocab_size": 500, "teacher_checkpointer.checkpoint_dir": checkpoint}
    assert "predicts 500 tokens, but model predicts 512" in refused(
        "ConfigError", "kd", tmp_path, **SMALL, **changes
    )


def made_with_vocabulary(folder: Path, tokens: int) -> str:
    """The teacher of the tiny config, with fewer tokens."""
    shutil.copytree(tiny.assets() / "teacher", folder)
    weights = folder / "model-00001-of-00001.safetensors"
    kept = load_file(weights)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        kept[name] = kept[name][:tokens].clone()
    save_file(kept, weights, metadata={"format": "pt"})
    return str(folder)


def test_losses_must_take_the_same_chunks(tmp_path: Path) -> None:
    chunks = {"kd_loss.num_output_chunks": 4}
    message = refused("ConfigError", "kd", tmp_path, **SMALL, **chunks)
    assert "takes logits in 4 chunks, but loss takes logits in 8 chunks" in message
