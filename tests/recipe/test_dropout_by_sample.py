"""Runs whose dropout belongs to samples: the same losses on any ranks, in micro-batches of any size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import (
    RESUME,
    Records,
    assert_same_end,
    losses,
    refused,
    stopped_after,
    train,
    undisturbed,
)
from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.recipe.settings.checks import check
from torchtune_adaptive.recipe.settings.kind_table import KINDS

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

DROPOUT: dict[str, Any] = {
    "adaptive_batching.dropout": "sample",
    "model.lora_dropout": 0.3,
    "max_steps_per_epoch": 4,
}
EVERY_STEP_SAVED = {"save_every_n_steps": 1, "keep_last_n_checkpoints": 20}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("lora", {}),
    "dora": ("lora", {"model.use_dora": True}),
    "dpo": ("lora_dpo", {}),
    "kd": ("kd", {}),
    "qat": ("qat_lora", {}),
    "packed": (
        "lora",
        {
            "dataset.packed": True,
            "dataset.split": "train[:500]",
            "tokenizer.max_seq_len": 256,
        },
    ),
}
EACH = [
    "lora",
    *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in [*RUNS][1:]),
]


def assert_same_losses(records: Records, expected: Records) -> None:
    assert losses(records) == pytest.approx(losses(expected), rel=0, abs=1e-6)
    assert len(set(losses(expected))) > 1, "nothing was learnt"


@pytest.mark.parametrize("kind", EACH)
def test_micro_batches_of_any_size(kind: str, tmp_path: Path) -> None:
    kind, changes = RUNS[kind]
    changes = {**DROPOUT, **changes}
    _, whole = undisturbed(kind, 1, **changes)
    for size in (1, 2):
        parts = {"batch_size": size, "gradient_accumulation_steps": 4 // size}
        assert_same_losses(train(kind, tmp_path / f"{size}", 1, **changes, **parts), whole)
    torchs = {**changes, "adaptive_batching.dropout": "torch"}
    assert losses(train(kind, tmp_path / "torch", 1, **torchs)) != losses(whole)


@pytest.mark.parametrize("kind", EACH)
def test_any_ranks(kind: str, tmp_path: Path) -> None:
    """From the second step on: on each number of ranks, new adapters are other ones."""
    kind, changes = RUNS[kind]
    changes = {**DROPOUT, **EVERY_STEP_SAVED, **changes, "batch_size": 2}
    folder, two = undisturbed(kind, 2, **changes)
    for ranks in (1, 4):
        stopped = stopped_after(1, folder, tmp_path / f"{ranks}")
        assert_same_losses(train(kind, stopped, ranks, **changes, **RESUME), two[1:])


@pytest.mark.exhaustive
def test_a_resumed_run_and_an_epoch_with_repeated_samples(tmp_path: Path) -> None:
    odd = {"dataset.split": "train[:23]", "max_steps_per_epoch": None, "epochs": 2, "batch_size": 2}
    changes = {**DROPOUT, **EVERY_STEP_SAVED, **odd}
    folder, two = undisturbed("lora", 2, **changes)
    assert len(two) == 12
    stopped = stopped_after(7, folder, tmp_path / "resumed")
    assert_same_end(train("lora", stopped, 2, **changes, **RESUME), two)
    alone = stopped_after(4, folder, tmp_path / "alone")
    assert_same_losses(train("lora", alone, 1, **changes, **RESUME), two[4:])


def test_checkpointing_changes_no_bit(tmp_path: Path) -> None:
    _, plain = undisturbed("lora", 1, **DROPOUT)
    for knob in ("all", "operations"):
        checkpointed = {**DROPOUT, "adaptive_batching.activation_checkpointing": knob}
        assert losses(train("lora", tmp_path / knob, 1, **checkpointed)) == losses(plain)


def test_a_retry_after_running_out_of_memory(tmp_path: Path) -> None:
    """Micro-batches get smaller than the config's, and the losses stay."""
    large = {**DROPOUT, "batch_size": 16, "max_steps_per_epoch": 3}
    plain = train("lora", tmp_path / "plain", 1, **large)
    limited = {**large, "adaptive_batching.memory_limit": "7MiB"}
    retried = train("lora", tmp_path / "retried", 1, **limited)
    assert retried[-1]["retried_steps"] > 0 and retried[-1]["micro_batch_size"] < 16
    assert_same_losses(retried, plain)


def test_a_search_changes_no_bit(tmp_path: Path) -> None:
    searched = {
        **DROPOUT,
        "use_maximum_batch_size": True,
        "adaptive_batching.memory_limit": "9MiB",
        "adaptive_batching.rounding": "none",
        "adaptive_batching.headroom": 0,
        "max_steps_per_epoch": 3,
    }
    found = train("lora", tmp_path / "searched", 1, **searched)
    size = int(found[0]["micro_batch_size"])
    fixed = {**DROPOUT, "batch_size": size, "max_steps_per_epoch": 3}
    assert losses(found) == losses(train("lora", tmp_path / "fixed", 1, **fixed))
    assert found[-1]["retried_steps"] == 0 and size > 1


def run_by_inductor(cfg: Any) -> tuple[Records, int]:
    """What was logged, and how many graphs were compiled."""
    os.environ.pop("TORCH_COMPILE_BACKEND", None)  # inductor is the default
    torch._inductor.config.compile_threads = 1
    return run_ours("lora", cfg), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.exhaustive
def test_compiled_by_inductor(tmp_path: Path) -> None:
    # No limit on memory: on the simulated device, compiled regions run eager.
    _, eager = undisturbed("lora", 1, **DROPOUT)
    cfg = tiny_config("lora", tmp_path, **DROPOUT, compile=True)
    [(compiled, graphs)] = run_ranks(run_by_inductor, 1, cfg, join=False, timeout=580)
    assert losses(compiled) == pytest.approx(losses(eager), rel=0, abs=5e-6)
    assert 0 < graphs <= 10, (
        "of layers with and without gradients of their input, for all lengths; and of the loss"
    )


@pytest.mark.exhaustive
def test_a_token_budget(tmp_path: Path) -> None:
    changes = {**DROPOUT, "batch_size": 8, "max_steps_per_epoch": 3}
    _, whole = undisturbed("lora", 1, **changes)
    for tokens in (256, 1024):
        budget = {"adaptive_batching.token_budget": tokens}
        records = train("lora", tmp_path / f"{tokens}", 1, **changes, **budget)
        assert_same_losses(records, whole)


def test_dropout_inside_of_attention_is_refused(tmp_path: Path) -> None:
    said = refused("ConfigError", "lora", tmp_path, **DROPOUT, **{"model.attn_dropout": 0.1})
    assert (
        "adaptive_batching.dropout: 'sample' does not work with layers.0.attn.attn_dropout" in said
    )
    assert "Set it to torch" in said


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("grpo_lora", {}, "this recipe generates its rows"),
        (
            "full",
            {"tensor_parallel_dim": 2, "tensor_parallel_plan": {"_component_": "a.b"}},
            "tensor_parallel_dim splits them",
        ),
        ("full", {"context_parallel_dim": 2}, "context_parallel_dim splits them"),
        (
            "lora",
            {"collate_fn": "torchtune.data.padded_collate_tiled_images_and_mask"},
            "images are padded in the middle",
        ),
    ],
)
def test_what_has_no_place_in_a_row_is_refused(
    kind: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    check(tiny_config(kind, tmp_path, **changes), KINDS[kind])
    cfg = tiny_config(kind, tmp_path, **changes, **{"adaptive_batching.dropout": "sample"})
    with pytest.raises(ConfigError, match=f"^adaptive_batching.dropout: 'sample' .*{said}"):
        check(cfg, KINDS[kind])
