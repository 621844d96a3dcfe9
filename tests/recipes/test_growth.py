"""Whole runs whose batch grows: what they train on, and that an interrupted run resumes bit-for-bit."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torchtune.data import padded_collate_sft

from tests.helpers import recipes
from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.recipes import run_ours, saved_weights, tiny_config
from torchtune_adaptive.common.errors import BatchIncreaseError, ConfigError
from torchtune_adaptive.recipe.registry import find_config
from torchtune_adaptive.recipe.settings.checks import check
from torchtune_adaptive.recipe.settings.kinds import KINDS
from torchtune_adaptive.recipe.train.growth import batch_increase

ROWS: list[list[int]] = []
"""Of each micro-batch that this process has collated: a number for each row, the same in every run."""


def collate(rows: list[Any], **settings: Any) -> dict[str, Any]:
    ROWS.append([hash(tuple(row["tokens"])) for row in rows])
    return padded_collate_sft(rows, **settings)  # type: ignore[return-value]


def grow(epoch: int, current_batch_size: int) -> int:
    """The RFC's example."""
    return 2 if epoch > 0 else 0


GROWING = {
    "batch_size": 2,
    "epochs": 3,
    "max_steps_per_epoch": 16,
    "clip_grad_norm": 1.0,
    "adaptive_batching.memory_limit": "40MiB",
    "adaptive_batching.ceiling": 8,
    "collate_fn": f"{__name__}.{collate.__name__}",
}
RFC = {**GROWING, "batch_increase_function": f"{__name__}.{grow.__name__}"}
WITHIN_EPOCHS = {
    **GROWING,
    "batch_increase_function": {
        "_component_": "torchtune_adaptive.schedule.Geometric",
        "every": 0.5,
    },
    "adaptive_batching.lr_scaling": "sqrt",
    "adaptive_batching.beta2": "half_life",
    "adaptive_batching.grow_past_memory": True,
}


def run(kind: str, cfg: DictConfig) -> tuple[list[dict[str, float]], list[list[int]]]:
    """What a run logs on rank 0, and the rows that this rank brings after the search."""
    records = run_ours(kind, cfg)
    return records, list(ROWS)


def test_a_batch_that_grows_by_the_rfcs_function(tmp_path: Path) -> None:
    (records, _), _ = run_ranks(run, 2, "full", tiny_config("full", tmp_path, **RFC), join=False)
    sizes = [int(record["batch_size"]) for record in records]
    assert sizes == [2] * 16 + [4] * 8 + [6] * 5
    assert [record["samples_seen"] for record in records][-1] == 64 + 64 + 60
    for record in records:
        assert record["global_batch_size"] == 2 * record["batch_size"]
        assert record["gradient_accumulation_steps"] == 1
    events = (tmp_path / "batch_size_events.jsonl").read_text().splitlines()
    assert [json.loads(event)["global_batch"] for event in events] == [[4, 8], [8, 12]]
    assert [json.loads(event)["samples"] for event in events] == [64, 128]
    assert (tmp_path / "training.png").stat().st_size > 10_000


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """A run that grew within its epochs and was never stopped: its folder, and what it logged."""
    folder = tmp_path_factory.mktemp("grown")
    cfg = tiny_config("full", folder, **WITHIN_EPOCHS)
    records, *_ = run_ranks(run_ours, 2, "full", cfg, join=False)
    return folder, records


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


class StopAt(recipes.Recorder):
    """A metric logger that ends the process, and with it the run, a step after a checkpoint."""

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        if step == int(os.environ["STOP_AT"]) + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().log_dict(payload, step)


def run_until(kind: str, cfg: DictConfig, step: int) -> None:
    os.environ["STOP_AT"] = str(step)
    run_ours(kind, cfg)


def stop_after(step: int, kind: str, folder: Path, changes: dict[str, Any]) -> None:
    """A run that saves a checkpoint after ``step``, and is killed in the next step.

    Rank 0 logs, so it kills itself; the other one has nothing left to do.
    """
    lethal = {
        **changes,
        "save_every_n_steps": step,
        "metric_logger._component_": f"{__name__}.{StopAt.__name__}",
    }
    cfg = tiny_config(kind, folder, **lethal)
    watch_ranks(run_until, 2, kind, cfg, step, until_exit_of=[0], timeout=60, join=False)


def resuming(folder: Path, kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    """What goes on from the only checkpoint of a run that was stopped in its first epoch."""
    (saved,) = folder.glob("epoch_*")
    again: dict[str, Any] = {
        **changes,
        "resume_from_checkpoint": True,
        "checkpointer.recipe_checkpoint": "recipe_state/recipe_state.pt",
    }
    if kind == "lora":
        again["checkpointer.adapter_checkpoint"] = f"{saved.name}/adapter_model.pt"
    else:
        again["checkpointer.checkpoint_files"] = [f"{saved.name}/model-00001-of-00001.safetensors"]
    return again


@pytest.mark.parametrize(
    ("kind", "stops"),
    [
        pytest.param("full", [7, 8, 9], id="before, at and after a change"),
        pytest.param("full", [12], id="where an epoch ends", marks=pytest.mark.exhaustive),
        pytest.param("lora", [8], id="lora with dropout", marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_that_was_stopped_goes_on_to_the_bit(
    kind: str, stops: list[int], tmp_path: Path, grown: tuple[Path, list[dict[str, float]]]
) -> None:
    changes = dict(WITHIN_EPOCHS)
    stopped = tmp_path / "stopped"
    whole, expected = grown
    if kind == "lora":
        changes["model.lora_dropout"] = 0.1
        whole = tmp_path / "whole"
        expected, *_ = run_ranks(run_ours, 2, kind, tiny_config(kind, whole, **changes), join=False)
    sizes = [record["global_batch_size"] for record in expected]
    assert sizes == [4] * 8 + [8] * 4 + [16] * 2 + [32, 64]

    again = changes
    for stop in stops:
        stop_after(stop, kind, stopped, again)
        again = resuming(stopped, kind, changes)
    resumed, *_ = run_ranks(run_ours, 2, kind, tiny_config(kind, stopped, **again), join=False)

    machine = {"tokens_per_second_per_gpu", "memory_unused_share"}
    later = [record for record in expected if record["step"] > stops[-1]]
    for one, other in zip(later, resumed, strict=True):
        differing = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
        assert differing <= machine
    ours, theirs = saved_weights(whole), saved_weights(stopped)
    final = {key for key in ours if key.startswith("epoch_2/")}
    assert final and all(torch.equal(ours[key], theirs[key]) for key in final)


@pytest.mark.exhaustive
def test_another_number_of_ranks_keeps_the_batch_and_the_order_or_says_why_not(
    tmp_path: Path, grown: tuple[Path, list[dict[str, float]]]
) -> None:
    stopped = tmp_path / "stopped"
    _, expected = grown
    stop_after(10, "full", stopped, WITHIN_EPOCHS)
    cfg = tiny_config("full", stopped, **resuming(stopped, "full", WITHIN_EPOCHS))
    with pytest.raises(AssertionError, match="BatchIncreaseError: The checkpoint's global batch"):
        run_ranks(run_ours, 3, "full", cfg, join=False)
    alone, *_ = run_ranks(run_ours, 1, "full", cfg, join=False)
    later = [record for record in expected if record["step"] > 10]
    for one, other in zip(alone, later, strict=True):
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
    with pytest.raises(AssertionError, match=error.__name__) as raised:
        run_ranks(run_ours, 1, "full", tiny_config("full", tmp_path, **changes), join=False)
    assert said in str(raised.value)


def test_a_batch_size_that_does_not_fit_is_refused_before_training(tmp_path: Path) -> None:
    changes = {**RFC, "batch_size": 16, "adaptive_batching.ceiling": None}
    with pytest.raises(AssertionError, match=r"batch_size: 16 does not fit"):
        run_ranks(run_ours, 2, "full", tiny_config("full", tmp_path, **changes), join=False)


def test_checkpoints_in_mid_epoch_give_way_to_the_next(tmp_path: Path) -> None:
    changes = {"save_every_n_steps": 2, "max_steps_per_epoch": 5, "epochs": 1}
    run_ranks(run_ours, 1, "full", tiny_config("full", tmp_path, **changes), join=False)
    assert [path.name for path in tmp_path.glob("epoch_*")] == ["epoch_0"]


def test_a_recorded_run_can_be_replayed(
    tmp_path: Path, grown: tuple[Path, list[dict[str, float]]]
) -> None:
    recorded, expected = grown
    replay = {
        "_component_": "torchtune_adaptive.schedule.Replay",
        "path": str(recorded / "batch_size_events.jsonl"),
    }
    changes = {**WITHIN_EPOCHS, "batch_increase_function": replay}
    replayed, *_ = run_ranks(
        run_ours, 2, "full", tiny_config("full", tmp_path, **changes), join=False
    )
    assert [r["loss"] for r in replayed] == [r["loss"] for r in expected]


@pytest.mark.exhaustive
def test_measuring_the_noise_changes_no_bit_and_act_grows_by_it(tmp_path: Path) -> None:
    plain = {"batch_size": 2, "max_steps_per_epoch": 30, "clip_grad_norm": 1.0}
    expected, *_ = run_ranks(
        run_ours, 2, "full", tiny_config("full", tmp_path / "plain", **plain), join=False
    )
    observing = {**plain, "adaptive_batching.gradient_noise": "observe"}
    observed, *_ = run_ranks(
        run_ours, 2, "full", tiny_config("full", tmp_path / "observed", **observing), join=False
    )
    for one, other in zip(expected, observed, strict=True):
        assert all(one[key] == other[key] for key in one.keys() - {"tokens_per_second_per_gpu"})
    assert all("gradient_noise_scale" not in record for record in observed[:9])
    assert observed[-1]["gradient_noise_scale"] > 0

    acting = {
        **plain,
        "batch_increase_function": {
            "_component_": "torchtune_adaptive.schedule.GradientNoise",
            "dwell": 12,
            "factor": 1000,
        },
        "adaptive_batching.memory_limit": "40MiB",
        "adaptive_batching.lr_scaling": "gain",
        "adaptive_batching.gradient_noise": "observe",
    }
    acted, *_ = run_ranks(
        run_ours, 2, "full", tiny_config("full", tmp_path / "acted", **acting), join=False
    )
    sizes = [record["global_batch_size"] for record in acted]
    assert sizes[:12] == [4] * 12 and sizes[12] == 8 and max(sizes) == 16
    assert acted[12]["lr"] > expected[12]["lr"]


def test_noise_that_cannot_be_measured_is_said_and_not_logged(tmp_path: Path) -> None:
    changes = {"max_steps_per_epoch": 12, "adaptive_batching.gradient_noise": "observe"}
    cfg = tiny_config("full", tmp_path, **changes)
    (alone,) = watch_ranks(run_ours, 1, "full", cfg, until_exit_of=[0], timeout=60, join=False)
    assert alone.exit_code == 0 and "cannot be measured in this run" in alone.said
    changes["gradient_accumulation_steps"] = 2
    records, *_ = run_ranks(
        run_ours, 1, "full", tiny_config("full", tmp_path, **changes), join=False
    )
    assert records[-1]["gradient_noise_scale"] > 0


@pytest.mark.parametrize(
    "schedule", ["function", "step", "geometric", "linear", "seesaw", "gradient_noise"]
)
def test_the_ready_config_has_every_schedule(schedule: str) -> None:
    cfg = OmegaConf.load(find_config("tiny/full_growing"))
    cfg.schedule = schedule
    assert isinstance(cfg, DictConfig)
    settings = check(cfg, KINDS["full"])
    grow = batch_increase(cfg, settings)
    assert settings.grows and grow is not None
    assert callable(grow) == (schedule == "function")
