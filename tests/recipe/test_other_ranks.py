"""Runs that are resumed on other ranks than they began with: the same steps of the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers.recipes import tiny_config
from tests.helpers.runs import (
    BIN,
    RESUME,
    assert_same_records,
    assert_same_steps,
    start,
    stopped_after,
    train,
    undisturbed,
)

pytestmark = pytest.mark.runs

EVERY_STEP_SAVED: dict[str, Any] = {
    "save_every_n_steps": 1,
    "keep_last_n_checkpoints": 20,
    "max_steps_per_epoch": None,
    "epochs": 2,
    "clip_grad_norm": 1.0,
}
ODD = {"dataset.split": "train[:23]"}
"""A sample is repeated for two ranks, so that an epoch has a step more than one rank alone would find."""

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "fixed": ("full", ODD),
    "lora": ("lora", ODD),
    "limited": ("full", {"dataset.split": "train[:64]", "max_steps_per_epoch": 5}),
    "accumulation": ("full", {**ODD, "batch_size": 2, "gradient_accumulation_steps": 2}),
    "dpo": ("lora_dpo", {"dataset.split": "train[:23]"}),
    "fastest": ("full", {**ODD, "use_fastest_configuration": True}),
    "token budget": ("full", {**ODD, "adaptive_batching.token_budget": 1024}),
    "streaming": ("full", {**ODD, "adaptive_batching.sample_order": "streaming"}),
    "streaming, in tokens": (
        "full",
        {
            **ODD,
            "adaptive_batching.sample_order": "streaming",
            "adaptive_batching.token_budget": 1024,
        },
    ),
    "packed": (
        "full",
        {
            "dataset.packed": True,
            "dataset.split": "train[:150]",
            "tokenizer.max_seq_len": 256,
            "batch_size": 2,
        },
    ),
    "searched": (
        "full",
        {
            "dataset.split": "train[:47]",
            "use_maximum_batch_size": True,
            "adaptive_batching.memory_limit": "10.5MiB",
            "adaptive_batching.ceiling": 4,
            "batch_size": 1,
        },
    ),
}


@pytest.mark.parametrize(
    "run", ["fixed", *(pytest.param(run, marks=pytest.mark.exhaustive) for run in [*RUNS][1:])]
)
def test_a_detour_over_one_rank_changes_no_step(run: str, tmp_path: Path) -> None:
    kind, changes = RUNS[run]
    changes = {**EVERY_STEP_SAVED, **changes}
    whole, expected = undisturbed(kind, 2, **changes)
    first = stopped_after(2, whole, tmp_path / "first")
    alone = train(kind, first, 1, **changes, **RESUME)
    assert_same_steps(alone, expected[2:])
    second = stopped_after(4, first, tmp_path / "second")
    both = train(kind, second, 2, **changes, **RESUME)
    assert_same_steps(both, expected[4:])
    for key in ("micro_batch_size", "gradient_accumulation_steps", "batch_size"):
        assert [one[key] for one in both] == [one[key] for one in expected[4:]]
    assert_same_records(
        train(kind, stopped_after(6, second, tmp_path / "third"), 2, **changes, **RESUME), both[2:]
    )


@pytest.mark.exhaustive
def test_a_batch_that_the_ranks_cannot_share_is_refused_in_one_line(tmp_path: Path) -> None:
    changes = {**EVERY_STEP_SAVED, **ODD}
    stopped = stopped_after(2, undisturbed("full", 2, **changes)[0], tmp_path / "out")
    cfg = tiny_config("full", stopped, **changes, **RESUME)
    cfg.metric_logger = {"_component_": "torchtune.training.metric_logging.StdoutLogger"}
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    log = tmp_path / "log"
    command = [BIN / "tune", "run", "--nproc_per_node", "3", "adaptive_full_finetune_distributed"]
    process = start([*command, "--config", "config.yaml"], tmp_path, log)
    assert process.wait(300) == 1, log.read_text()
    said = log.read_text()
    reason = "The checkpoint's global batch is 8 samples, which 3 ranks cannot share equally."
    assert said.count(reason) == 1, said
