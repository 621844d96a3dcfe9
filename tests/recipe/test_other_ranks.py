"""Runs that are resumed on other ranks than they began with: the same steps of the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers.recipes import quantised, tiny_config
from tests.helpers.runs import (
    BIN,
    RESUME,
    Records,
    after,
    assert_same_records,
    assert_same_steps,
    start,
    stopped_after,
    train,
    undisturbed,
)

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

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


EIGHT: dict[str, Any] = {"batch_size": 4, "dataset.split": "train[:40]"}
"""Steps of 8 samples on two ranks; on three, these have 3, 3 and 2."""
SINGLE: dict[str, Any] = {**EIGHT, "batch_size": 1, "gradient_accumulation_steps": 4}
"""The same in micro-batches of one row, so that the third rank has none for the last."""

UNEVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", SINGLE),
    "full, all at once": ("full", EIGHT),
    "noise": ("full", {**SINGLE, "adaptive_batching.gradient_noise": "observe"}),
    "optimizer in backward": (
        "full",
        {**SINGLE, "optimizer_in_bwd": True, "gradient_accumulation_steps": 1, "batch_size": 4}
        | {"clip_grad_norm": None},
    ),
    "lora": ("lora", SINGLE),
    "qlora": ("lora", {**SINGLE, "gradient_accumulation_steps": 3}),  # see below
    "dpo": ("full_dpo", SINGLE),
    "lora dpo": ("lora_dpo", SINGLE),
    "kd": ("kd", SINGLE),
    "qat": ("qat", SINGLE),
    "qat lora": ("qat_lora", SINGLE),
    "packed": (
        "full",
        {
            **SINGLE,
            "dataset.packed": True,
            "dataset.split": "train[:300]",
            "tokenizer.max_seq_len": 256,
        },
    ),
    "token budget": ("full", {**EIGHT, "adaptive_batching.token_budget": 1024}),
    "streaming": ("full", {**SINGLE, "adaptive_batching.sample_order": "streaming"}),
    "searched": RUNS["searched"],
    "fastest": ("full", {**EIGHT, "use_fastest_configuration": True}),
    "growing": (
        "full",
        {
            **EIGHT,
            "batch_increase_function": {
                "_component_": "torchtune_adaptive.schedule.Geometric",
                "factor": 1.5,
                "every": 0.4,
            },
            "adaptive_batching.memory_limit": "24MiB",
        },
    ),
    "validated": (
        "full",
        {
            **SINGLE,
            "run_val_every_n_steps": 1,
            "dataset_val": "${dataset}",
            "batch_size_val": 4,
        },
    ),
    "sharded": ("full", {**SINGLE, "adaptive_batching.sharded_checkpoints": True}),
}


@pytest.mark.parametrize(
    "run", ["full", *(pytest.param(run, marks=pytest.mark.exhaustive) for run in [*UNEVEN][1:])]
)
def test_a_detour_over_ranks_that_do_not_divide_the_batch_changes_no_step(
    run: str, tmp_path: Path
) -> None:
    kind, changes = UNEVEN[run]
    changes = {**EVERY_STEP_SAVED, "max_steps_per_epoch": 3, **changes}
    others = 3
    if run == "qlora":
        changes |= quantised(tmp_path)
        others = 4  # quantized weights must come out even
    # A weight that is quantized to its neighbour, as rounding wants it, is a change that remains.
    rel = 1e-3 if kind.startswith("qat") else 1e-5
    whole, expected = undisturbed(kind, 2, **changes)
    first = stopped_after(2, whole, tmp_path / "first")
    uneven = train(kind, first, others, **changes, **RESUME)
    assert_same_steps(uneven, after(2, expected), rel)
    second = stopped_after(4, first, tmp_path / "second")
    both = train(kind, second, 2, **changes, **RESUME)
    assert_same_steps(both, after(4, expected), rel)
    for one, other in zip(both, after(4, expected), strict=True):
        for key in one.keys() & {"micro_batch_size", "gradient_accumulation_steps", "batch_size"}:
            assert one[key] == other[key], key


@pytest.mark.exhaustive
def test_copies_of_shards_on_other_ranks_change_no_step(tmp_path: Path) -> None:
    changes = {**EVERY_STEP_SAVED, "epochs": 1, "max_steps_per_epoch": 3}
    changes |= {"data_parallel_replicate_dim": 2, "batch_size": 2}
    whole, expected = undisturbed("full", 4, **changes)
    stopped = stopped_after(1, whole, tmp_path / "stopped")
    assert_same_steps(train("full", stopped, 6, **changes, **RESUME), after(1, expected))


ROLLOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"batch_size": 2, "grpo_samples": 3, "ppo_epochs": 2, "num_steps": 4}),
    "grpo, one by one": (
        "grpo_lora",
        {
            **{"batch_size": 2, "grpo_samples": 2, "num_steps": 4},
            "gradient_accumulation_steps": 4,
            "loss._component_": "torchtune_adaptive.recipe.kinds.grpo.GRPOSimpleLoss",
        },
    ),
    "grpo, searched": (
        "grpo",
        {
            **{"batch_size": 2, "grpo_samples": 3, "num_steps": 4},
            "use_maximum_batch_size": True,
            "adaptive_batching.memory_limit": "24MiB",
        },
    ),
    "grpo, in tokens": (
        "grpo",
        {
            **{"batch_size": 2, "grpo_samples": 3, "num_steps": 4},
            **{"use_maximum_batch_size": True, "adaptive_batching.token_budget": True},
            "adaptive_batching.memory_limit": "24MiB",
        },
    ),
    "ppo": (
        "ppo",
        {
            **{"dataset.split": "train[:16]", "batch_size": 4, "ppo_batch_size": 2},
            **{"num_steps": 24, "gradient_accumulation_steps": 2},
        },
    ),
}


@pytest.mark.parametrize(
    "run", ["grpo", *(pytest.param(run, marks=pytest.mark.exhaustive) for run in [*ROLLOUTS][1:])]
)
def test_a_detour_over_ranks_with_unequal_rollouts_changes_no_step(
    run: str, tmp_path: Path
) -> None:
    kind, changes = ROLLOUTS[run]
    changes = {**EVERY_STEP_SAVED, "max_generated_tokens": 8, **changes}
    del changes["max_steps_per_epoch"], changes["epochs"]
    whole, expected = undisturbed(kind, 2, **changes)
    saved = sorted(
        int(path.name.rpartition("_")[2]) for path in whole.glob("epoch_*_step_*") if path.is_dir()
    )
    steps = [record for record in expected if "loss" in record]
    first = stopped_after(saved[0], whole, tmp_path / "first")
    uneven = train(kind, first, 3, **changes, **RESUME)
    assert_same_rollouts(uneven, after(saved[0], steps))
    second = stopped_after(saved[1], first, tmp_path / "second")
    both = train(kind, second, 2, **changes, **RESUME)
    assert_same_rollouts(both, after(saved[1], steps))


def assert_same_rollouts(records: Records, expected: Records) -> None:
    """The same responses and rewards, and losses up to rounding."""
    for one, other in zip(records, expected, strict=True):
        for key in ("step", "global_batch_size", "samples_seen", "lr", "num_stop_tokens"):
            assert one[key] == other[key], key
        for key in one.keys() & {"rewards", "successes", "response_lengths", "scores", "kl"}:
            assert one[key] == pytest.approx(other[key], rel=1e-5), key
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)


@pytest.mark.exhaustive
def test_fewer_rows_than_ranks_are_refused_in_one_line(tmp_path: Path) -> None:
    changes = {**EVERY_STEP_SAVED, "batch_size": 1, "dataset.split": "train[:8]"}
    stopped = stopped_after(2, undisturbed("full", 2, **changes)[0], tmp_path / "out")
    cfg = tiny_config("full", stopped, **changes, **RESUME)
    cfg.metric_logger = {"_component_": "torchtune.training.metric_logging.StdoutLogger"}
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    log = tmp_path / "log"
    command = [BIN / "tune", "run", "--nproc_per_node", "3", "adaptive_full_finetune_distributed"]
    process = start([*command, "--config", "config.yaml"], tmp_path, log)
    assert process.wait(300) == 1, log.read_text()
    said = log.read_text()
    reason = "batch_size: 2 is all rows of a step, and not one for each of 3 ranks"
    assert said.count(reason) == 1, said
