"""Whole runs whose batch grows: what they train on, and that an interrupted run resumes bit-for-bit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.helpers.growing import GROWING, ROWS, WITHIN_EPOCHS
from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import (
    RESUME,
    Records,
    assert_equal,
    assert_same_end,
    assert_same_weights,
    losses,
    refused,
    stopped_after,
    train,
    undisturbed,
)
from torchtune_adaptive.common.errors import BatchIncreaseError, ConfigError
from torchtune_adaptive.recipe.registry import find_config
from torchtune_adaptive.recipe.settings.checks import check
from torchtune_adaptive.recipe.settings.kind_table import KINDS
from torchtune_adaptive.recipe.train.growth import batch_increase

pytestmark = [pytest.mark.runs, pytest.mark.alternating]


def grow(epoch: int, current_batch_size: int) -> int:
    """The RFC's example."""
    return 2 if epoch > 0 else 0


RFC = {**GROWING, "batch_increase_function": f"{__name__}.{grow.__name__}"}


EVERY_STEP_SAVED = {**WITHIN_EPOCHS, "save_every_n_steps": 1, "keep_last_n_checkpoints": 99}


def run(kind: str, cfg: DictConfig) -> tuple[Records, list[list[int]]]:
    """What a run logs on rank 0, and the rows that this rank brings after the search."""
    records = run_ours(kind, cfg)
    return records, list(ROWS)


def test_a_batch_that_grows_by_the_rfcs_function(tmp_path: Path) -> None:
    cfg = tiny_config("full", tmp_path, **{**RFC, "max_steps_per_epoch": 8})
    records, _ = run_ranks(run_ours, 2, "full", cfg, True, join=False)
    sizes = [int(record["batch_size"]) for record in records]
    assert sizes == [2] * 8 + [4] * 4 + [6] * 2
    assert [record["samples_seen"] for record in records][-1] == 32 + 32 + 24
    for record in records:
        assert record["global_batch_size"] == 2 * record["batch_size"]
        assert record["gradient_accumulation_steps"] == 1
    events = (tmp_path / "batch_size_events.jsonl").read_text().splitlines()
    assert [json.loads(event)["global_batch"] for event in events] == [[4, 8], [8, 12]]
    assert [json.loads(event)["samples"] for event in events] == [32, 64]
    assert (tmp_path / "training.png").stat().st_size > 10_000


@pytest.mark.exhaustive
def test_the_schedule_ends_where_it_should_and_no_sample_is_lost(tmp_path: Path) -> None:
    changes = {**WITHIN_EPOCHS, "max_steps_per_epoch": None, "epochs": 2}
    changes |= {"adaptive_batching.lr_scaling": "none", "dataset.split": "train[:320]"}
    ranks = run_ranks(run, 2, "full", tiny_config("full", tmp_path, **changes), join=False)
    records = ranks[0][0]
    sizes = [int(record["global_batch_size"]) for record in records]
    assert sizes == [4] * 40 + [8] * 20 + [16] * 10 + [32] * 5
    assert records[-1]["lr"] == pytest.approx(0, abs=1e-9), "the cosine is at its end"
    warm_up = [record["lr"] for record in records[:5]]
    assert warm_up == sorted(warm_up) and records[4]["lr"] == max(r["lr"] for r in records)
    assert records[-1]["samples_seen"] == 2 * 320
    brought = [[row for rows in micro_batches for row in rows] for _, micro_batches in ranks]
    # Of what each rank has collated, the trials of the search came first; then 160 rows in each epoch.
    epochs = [Counter(row for rows in brought for row in rows[at:][:160]) for at in (-320, -160)]
    assert sum(epochs[0].values()) == sum(epochs[1].values()) == 320 and epochs[0] == epochs[1]


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("kind", "ranks", "stops"),
    [
        pytest.param("full", 1, [7], id="before a change"),
        pytest.param("full", 1, [8], id="at a change"),
        pytest.param("full", 1, [9], id="after a change"),
        pytest.param("full", 2, [7, 8, 9], id="three times", marks=pytest.mark.exhaustive),
        pytest.param("full", 2, [12], id="where an epoch ends", marks=pytest.mark.exhaustive),
        pytest.param("lora", 2, [8], id="lora with dropout", marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_that_was_stopped_goes_on_to_the_bit(
    kind: str, ranks: int, stops: list[int], tmp_path: Path
) -> None:
    changes = {**EVERY_STEP_SAVED, "batch_size": 4 // ranks}
    if kind == "lora":
        changes["model.lora_dropout"] = 0.1
    whole, expected = undisturbed(kind, ranks, **changes)
    sizes = [record["global_batch_size"] for record in expected]
    assert sizes == [4] * 8 + [8] * 4 + [16] * 2 + [32, 64]
    before = whole
    for stop in stops:
        before = stopped_after(stop, before, tmp_path / str(stop))
        resumed = train(kind, before, ranks, **changes, **RESUME)
        assert resumed[0]["step"] == stop + 1
        assert_same_end(resumed, expected)
    assert_same_weights(whole / "epoch_2", before / "epoch_2")


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_keeps_the_batch_and_the_order(ranks: int, tmp_path: Path) -> None:
    whole, expected = undisturbed("full", 2, **EVERY_STEP_SAVED)
    stopped = stopped_after(10, whole, tmp_path / "stopped")
    resumed = train("full", stopped, ranks, **EVERY_STEP_SAVED, **RESUME)
    assert resumed[0]["step"] == 11
    for one, other in zip(resumed, expected[10:], strict=True):
        for key in ("step", "global_batch_size", "samples_seen", "lr"):
            assert one[key] == other[key]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)


def bad(epoch: int, current_batch_size: int) -> Any:
    return "more"


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "no such module": ("no_such_module.grow", ConfigError, "no_such_module"),
    "not a function": (f"{__name__}.GROWING", ConfigError, "cannot be called"),
    "wrong argument": (
        {"_component_": "torchtune_adaptive.schedule.Geometric", "facter": 2},
        ConfigError,
        "facter",
    ),
    "wrong answer": (f"{__name__}.{bad.__name__}", BatchIncreaseError, "returned 'more'"),
}


@pytest.mark.parametrize(("value", "error", "said"), WRONG.values(), ids=WRONG)
def test_nonsense_stops_with_the_reason(
    value: Any, error: type[Exception], said: str, tmp_path: Path
) -> None:
    changes = {**GROWING, "batch_increase_function": value}
    assert said in refused(error.__name__, "full", tmp_path, **changes)


def test_a_batch_size_that_does_not_fit_is_refused_before_training(tmp_path: Path) -> None:
    changes = {**RFC, "batch_size": 16, "adaptive_batching.ceiling": None}
    assert "batch_size: 16 does not fit" in refused("ConfigError", "full", tmp_path, 2, **changes)


def test_checkpoints_in_mid_epoch_give_way_to_the_next_two(tmp_path: Path) -> None:
    train("full", tmp_path, save_every_n_steps=2, max_steps_per_epoch=5)
    assert {path.name for path in tmp_path.glob("epoch_*")} == {"epoch_0_step_4", "epoch_0"}


@pytest.mark.exhaustive
def test_a_recorded_run_can_be_replayed(tmp_path: Path) -> None:
    recorded, expected = undisturbed("full", 2, **EVERY_STEP_SAVED)
    replay = {
        "_component_": "torchtune_adaptive.schedule.Replay",
        "path": str(recorded / "batch_size_events.jsonl"),
    }
    changes = {**WITHIN_EPOCHS, "batch_increase_function": replay}
    assert losses(train("full", tmp_path, 2, **changes)) == losses(expected)


@pytest.mark.exhaustive
def test_measuring_the_noise_changes_no_bit_and_act_grows_by_it(tmp_path: Path) -> None:
    plain = {"batch_size": 2, "epochs": 2, "max_steps_per_epoch": 30, "clip_grad_norm": 1.0}
    observing = {**plain, "adaptive_batching.gradient_noise": "observe"}
    acting = {
        **observing,
        "batch_increase_function": {
            "_component_": "torchtune_adaptive.schedule.GradientNoise",
            "dwell": 12,
            "factor": 1000,
        },
        "adaptive_batching.memory_limit": "40MiB",
        "adaptive_batching.lr_scaling": "gain",
    }
    expected, observed, acted = (
        train("full", tmp_path, 2, **how) for how in (plain, observing, acting)
    )
    for one, other in zip(expected, observed, strict=True):
        assert_equal(one, other)
    assert all("gradient_noise_scale" not in record for record in observed[:9])
    assert observed[-1]["gradient_noise_scale"] > 0
    sizes = [record["global_batch_size"] for record in acted]
    assert sizes[:12] == [4] * 12 and sizes[12] == 8 and max(sizes) == 16
    assert acted[12]["lr"] > expected[12]["lr"]


def test_noise_that_cannot_be_measured_is_said_and_not_logged(tmp_path: Path) -> None:
    changes = {"max_steps_per_epoch": 12, "adaptive_batching.gradient_noise": "observe"}
    cfg = tiny_config("full", tmp_path, **changes)
    (alone,) = watch_ranks(run_ours, 1, "full", cfg, until_exit_of=[0], join=False)
    assert alone.exit_code == 0 and "cannot be measured in this run" in alone.said
    changes["gradient_accumulation_steps"] = 2
    records = train("full", tmp_path, **changes)
    assert records[-1]["gradient_noise_scale"] > 0


@pytest.mark.parametrize(
    "schedule", ["function", "step", "geometric", "linear", "seesaw", "gradient_noise"]
)
def test_the_ready_config_has_every_schedule(schedule: str) -> None:
    cfg = OmegaConf.load(find_config("tiny/full_growing"))
    cfg.schedule = schedule
    assert isinstance(cfg, DictConfig)
    asked = check(cfg, KINDS["full"])
    grow = batch_increase(asked)
    assert asked.settings.grows and grow is not None
    assert callable(grow) == (schedule == "function")
