"""Distillation trains like torchtune's recipe, once that one's gradients have the right size."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchtune import training

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours, run_torchtunes, saved_weights, tiny_config
from torchtune_adaptive.recipe import tiny

SMALL: dict[str, Any] = {
    "batch_size": 2,
    "max_steps_per_epoch": 3,
    "epochs": 1,
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


def run_torchtunes_corrected(cfg: Any) -> list[dict[str, float]]:
    """It backpropagates the mean loss and then divides gradients by the number of tokens once more."""
    training.scale_grads = lambda model, scaler: None
    return run_torchtunes("kd", cfg)


def assert_same_run(folder: Path, changes: dict[str, Any], ranks: int) -> None:
    cfg = {
        name: tiny_config("kd", folder / name, **SMALL, **changes) for name in ("theirs", "ours")
    }
    theirs, *_ = run_ranks(run_torchtunes_corrected, ranks, cfg["theirs"], join=False)
    ours, *_ = run_ranks(run_ours, ranks, "kd", cfg["ours"], join=False)
    assert len(theirs) == len(ours) == 3
    for their, our in zip(theirs, ours, strict=True):
        assert our["lr"] == their["lr"]
        if ranks == 1:  # torchtune logs what rank 0 has seen, we the mean over all ranks
            for name in ("loss", "class_loss", "kd_loss"):
                exactly = their is theirs[0]
                assert our[name] == pytest.approx(their[name], rel=1e-7 if exactly else 1e-4), name
    assert abs(ours[-1]["loss"] - ours[0]["loss"]) > 1e-3
    their_weights, our_weights = saved_weights(folder / "theirs"), saved_weights(folder / "ours")
    assert their_weights.keys() == our_weights.keys() and their_weights
    for name, weight in their_weights.items():
        torch.testing.assert_close(our_weights[name], weight, rtol=1e-3, atol=1e-5)


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
    assert_same_run(tmp_path, changes, ranks)


def refused(changes: dict[str, Any], folder: Path) -> str:
    with pytest.raises(AssertionError, match="ConfigError: ") as raised:
        run_ranks(run_ours, 1, "kd", tiny_config("kd", folder, **SMALL, **changes), join=False)
    return str(raised.value)


def test_models_must_have_the_same_vocabulary(tmp_path: Path) -> None:
    checkpoint = made_with_vocabulary(tmp_path / "teacher", 500)
    changes = {"teacher_model.vocab_size": 500, "teacher_checkpointer.checkpoint_dir": checkpoint}
    assert "predicts 500 tokens, but model predicts 512" in refused(changes, tmp_path)


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
    message = refused({"kd_loss.num_output_chunks": 4}, tmp_path)
    assert "takes logits in 4 chunks, but loss takes logits in 8 chunks" in message
