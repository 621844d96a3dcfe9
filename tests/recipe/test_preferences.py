"""DPO trains like torchtune's recipes, and has what the other recipes have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import Record, assert_torchtunes, train

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

METRICS = [
    f"{name}/{side}"
    for name in ("rewards", "log_probs", "logits")
    for side in ("chosen", "rejected")
] + ["rewards/accuracies", "rewards/margins"]
SMALL = {"batch_size": 2, "max_steps_per_epoch": 3}
WITH_EVERYTHING: dict[str, Any] = {
    **SMALL,
    "gradient_accumulation_steps": 2,
    "enable_activation_checkpointing": True,
    "tokenizer.max_seq_len": 64,
    "optimizer._component_": "torch.optim.SGD",
    "optimizer.lr": 100.0,
}


def assert_is_torchtunes(kind: str, folder: Path, changes: dict[str, Any], ranks: int) -> None:
    """Losses and weights are bitwise equal; metrics, which are sums of rows, nearly."""
    # torchtune's LoRA recipe logs the sum over ranks of what the other one logs the mean of.
    summed = ranks if kind == "lora_dpo" else 1

    def assert_same(their: Record, our: Record) -> None:
        assert our["loss"] * summed == their["loss"]
        assert our["lr"] == their["lr"]
        for name in METRICS:
            assert our[name] == pytest.approx(their[name], rel=1e-4, abs=1e-5), name
        assert our["tokens_per_second_per_gpu"] > 0

    ours = assert_torchtunes(kind, folder, changes, ranks, assert_same=assert_same)
    assert ours[0]["loss"] != ours[-1]["loss"]


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["full_dpo", "lora_dpo"])
def test_two_ranks_train_as_with_torchtune(kind: str, tmp_path: Path) -> None:
    assert_is_torchtunes(kind, tmp_path, WITH_EVERYTHING, ranks=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [{}, {"dtype": "bf16"}, {"loss": {"_component_": "torchtune.rlhf.loss.RSOLoss", "gamma": 0.1}}],
    ids=["fp32", "bf16", "hinge"],
)
@pytest.mark.parametrize("kind", ["full_dpo", "lora_dpo"])
def test_training_is_torchtunes(
    kind: str, changes: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    assert_is_torchtunes(kind, tmp_path, {**SMALL, **changes}, ranks)


@pytest.mark.exhaustive  # with every kind of row a step is retried in the same way
def test_pairs_that_do_not_fit_are_retried_in_smaller_micro_batches(tmp_path: Path) -> None:
    limited = {
        "adaptive_batching.on_out_of_memory": "shrink",
        "adaptive_batching.memory_limit": "13MiB",
    }
    checkpointed = {"enable_activation_checkpointing": True}  # or a step would turn it on
    plain, retried = (
        train("full_dpo", tmp_path, 2, batch_size=8, epochs=2, **checkpointed, **changes)
        for changes in ({}, limited)
    )
    assert retried[-1]["retried_steps"] > 0
    assert min(record["micro_batch_size"] for record in retried) < 8
    assert retried[-1]["global_batch_size"] == plain[-1]["global_batch_size"] == 16
    for one, other in zip(plain, retried, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["rewards/margins"] == pytest.approx(one["rewards/margins"], abs=1e-5)


def test_a_batch_of_pairs_grows(tmp_path: Path) -> None:
    changes = {
        "batch_size": 2,
        "epochs": 2,
        "max_steps_per_epoch": 2,
        "batch_increase_function": "torchtune_adaptive.recipe.tiny.two_more_rows",
        "adaptive_batching.memory_limit": "40MiB",
    }
    records = train("lora_dpo", tmp_path, **changes)
    assert [record["micro_batch_size"] for record in records] == [2, 2, 4]
    assert [record["samples_seen"] for record in records] == [2, 4, 8]
