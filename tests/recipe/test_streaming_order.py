"""Runs whose samples are shuffled without an order in memory: resumed anywhere, on any ranks, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import watch_ranks
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import (
    ALL_KEPT,
    RESUME,
    assert_same_records,
    assert_same_weights,
    losses,
    stopped_after,
    train,
    undisturbed,
)

pytestmark = pytest.mark.runs

STREAMING = {"adaptive_batching.sample_order": "streaming"}
SHORT: dict[str, Any] = {
    **ALL_KEPT,
    "save_every_n_steps": 1,
    "max_steps_per_epoch": 3,
    "epochs": 2,
    "dataset.split": "train[:29]",
}
ROLLOUTS: dict[str, Any] = {
    **ALL_KEPT,
    "batch_size": 2,
    "grpo_samples": 4,
    "max_generated_tokens": 8,
    "num_steps": 4,
    "save_every_n_steps": 1,
    "lr_scheduler.num_warmup_steps": 0,
}

RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "full": ("full", 1, SHORT),
    "full on 2 ranks": ("full", 2, SHORT),
    "lora": ("lora", 2, SHORT),
    "dpo": ("lora_dpo", 2, SHORT),
    "distillation": ("kd", 1, SHORT),
    "token budget": ("full", 2, {**SHORT, "adaptive_batching.token_budget": 1024}),
    "grpo": ("grpo", 2, ROLLOUTS),
}


@pytest.mark.parametrize(
    "run", ["full", *(pytest.param(run, marks=pytest.mark.exhaustive) for run in [*RUNS][1:])]
)
def test_a_run_goes_on_in_the_middle_of_an_epoch_to_the_bit(run: str, tmp_path: Path) -> None:
    kind, ranks, changes = RUNS[run]
    whole, expected = undisturbed(kind, ranks, **changes, **STREAMING)
    steps = len(losses(expected))
    assert steps >= 2
    resumed = stopped_after(max(1, steps // 2 - 1), whole, tmp_path / "resumed")
    rest = train(kind, resumed, ranks, **changes, **STREAMING, **RESUME)
    assert 0 < len(losses(rest)) < steps
    assert_same_records(rest, expected[-len(rest) :])
    last = sorted(path.name for path in whole.glob("epoch_*"))[-1]
    assert_same_weights(whole / last, resumed / last)
    _, torchtunes = undisturbed(kind, ranks, **changes)
    assert losses(torchtunes) != losses(expected), "it is another order"


@pytest.mark.exhaustive
def test_another_seed_is_another_order(tmp_path: Path) -> None:
    """torchtune's order is the same with every seed."""
    changes = {**SHORT, **STREAMING, "optimizer.lr": 0.0}
    found = {
        seed: losses(train("full", tmp_path / f"{seed}", seed=seed, **changes)) for seed in (1, 2)
    }
    assert found[1] != found[2]
    assert losses(train("full", tmp_path / "again", seed=1, **changes)) == found[1]


def test_a_resumed_run_keeps_its_order_whatever_the_config_says(tmp_path: Path) -> None:
    whole, expected = undisturbed("full", **SHORT, **STREAMING)
    resumed = stopped_after(2, whole, tmp_path / "resumed")
    cfg = tiny_config("full", resumed, **SHORT, **RESUME)
    (run,) = watch_ranks(run_ours, 1, "full", cfg, until_exit_of=[0], join=False)
    assert "adaptive_batching.sample_order unset -> streaming (the checkpoint's)" in run.said
    last = "epoch_1"
    assert_same_weights(whole / last, resumed / last)
    assert len(losses(expected)) == 6
