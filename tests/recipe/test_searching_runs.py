"""A run that searches, then trains, is bitwise equal to a run that was given the size."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import (
    ALL_KEPT,
    assert_equal,
    assert_same_weights,
    losses,
    named_checkpoint,
    refused,
    train,
)
from torchtune_adaptive.common.errors import NothingFits
from torchtune_adaptive.planner import workers
from torchtune_adaptive.recipe.plan import background
from torchtune_adaptive.recipe.plan.calibration import Calibration, Calibrations
from torchtune_adaptive.recipe.settings.asked import Asked

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

SEARCH = {
    "use_maximum_batch_size": True,
    "adaptive_batching.memory_limit": "24MiB",
    "batch_size": 1,
    "max_steps_per_epoch": 2,
}

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {"clip_grad_norm": 1.0}),
    "bf16": ("full", {"dtype": "bf16"}),
    "checkpointed": ("full", {"enable_activation_checkpointing": True}),
    "accumulation": ("full", {"gradient_accumulation_steps": 2}),
    "optimizer in backward": ("full", {"optimizer_in_bwd": True}),
    "packed": ("full", {"dataset.packed": True, "tokenizer.max_seq_len": 128}),
    "lora with dropout": ("lora", {"model.lora_dropout": 0.1}),
    "dora": ("lora", {"model.use_dora": True}),
    "any size": ("full", {"adaptive_batching.rounding": "none"}),
    "bisect": ("full", {"adaptive_batching.search": "bisect"}),
    "predict": ("lora", {"adaptive_batching.search": "predict"}),
    "full dpo": ("full_dpo", {}),
    "lora dpo": ("lora_dpo", {}),
    "distillation": ("kd", {}),
    "quantised": ("qat", {"fake_quant_after_n_steps": 2}),
    "quantised lora": ("qat_lora", {"fake_quant_after_n_steps": 2}),
}
COMBINED = [
    ("full", "checkpointed", "accumulation"),
    ("optimizer in backward", "packed", "bisect"),
    ("lora with dropout", "dora"),
]
"""What the quick tier runs instead of one after the other."""


def written(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "batch_size_search.json").read_text())


@pytest.mark.rotating
@pytest.mark.parametrize("names", COMBINED, ids=" + ".join)
def test_training_after_a_search_is_training_without_in_combinations(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    assert_training_is_the_same(
        RUNS[names[0]][0],
        {key: value for name in names for key, value in RUNS[name][1].items()},
        tmp_path,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "changes"), RUNS.values(), ids=RUNS)
def test_training_after_a_search_is_training_without(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    assert_training_is_the_same(kind, changes, tmp_path)


def assert_training_is_the_same(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    searched = train(kind, tmp_path / "searched", 2, **{**changes, **SEARCH})
    found = written(tmp_path / "searched")
    assert found["batch_size"] > 1 == found["before"]["batch_size"]
    told = {**changes, "batch_size": found["batch_size"], "max_steps_per_epoch": 2}
    fixed = train(kind, tmp_path / "fixed", 2, **told)
    for one, other in zip(searched, fixed, strict=True):
        assert_equal(other, one)
        assert one["batch_size"] == found["batch_size"]
        assert one["global_batch_size"] == found["global_batch_size"]
    assert_same_weights(tmp_path / "searched", tmp_path / "fixed")


def test_a_resumed_run_searches_with_its_optimizer_state(tmp_path: Path) -> None:
    twice = {"epochs": 2, "max_steps_per_epoch": 2, **ALL_KEPT}
    train("full", tmp_path, 2, **twice)
    again = {**twice, **named_checkpoint("full")}
    searched, told = (
        losses(train("full", tmp_path, 2, **{**how, **again}))
        for how in (SEARCH, {"batch_size": 8})
    )
    assert written(tmp_path)["batch_size"] == 8, "the second run is told this size"
    assert len(searched) == 2 and searched == told


def test_the_global_batch_can_stay(tmp_path: Path) -> None:
    changes = {
        **SEARCH,
        "batch_size": 3,
        "gradient_accumulation_steps": 4,
        "adaptive_batching.keep_global_batch": True,
    }
    run = train("full", tmp_path, 2, **changes)
    found = written(tmp_path)
    assert found["global_batch_size"] == found["before"]["global_batch_size"] == 24
    # The divisors of 12 are 1, 2, 3, 4, 6, 12; the largest that fits is the answer.
    assert (found["batch_size"], found["gradient_accumulation_steps"]) == (6, 2)
    assert {step["global_batch_size"] for step in run} == {24}


def test_a_found_size_is_remembered_and_confirmed_by_one_trial(tmp_path: Path) -> None:
    changes = {
        **SEARCH,
        "adaptive_batching.search_only": True,
        "adaptive_batching.cache": str(tmp_path / "cache"),
    }
    for number, trials in ((1, 4), (2, 1)):
        train("full", tmp_path / str(number), **changes)
        assert len(written(tmp_path / str(number))["trials"]) == trials
    assert written(tmp_path / "1")["batch_size"] == written(tmp_path / "2")["batch_size"]
    # Remembered, but too much for a device that shrank: the facts say so, and the search is made again.
    train("full", tmp_path / "3", **{**changes, "adaptive_batching.memory_limit": "16MiB"})
    assert written(tmp_path / "3")["batch_size"] < written(tmp_path / "1")["batch_size"]


def test_a_predicted_size_is_confirmed_by_one_trial(tmp_path: Path) -> None:
    changes = {
        **SEARCH,
        "adaptive_batching.rounding": "none",
        "adaptive_batching.search_only": True,
        "adaptive_batching.cache": str(tmp_path / "cache"),
    }
    found = {}
    for way in ("predict", "bisect"):
        shutil.rmtree(tmp_path / "cache" / "batch_sizes", ignore_errors=True)
        cfg = tiny_config("full", tmp_path / way, **changes, **{"adaptive_batching.search": way})
        run_ranks(run_ours, 2, "full", cfg, join=False)
        found[way] = written(tmp_path / way)
    assert found["predict"]["batch_size"] == found["bisect"]["batch_size"]
    assert len(found["predict"]["trials"]) == 1
    learned = Calibrations(Calibration, Asked.of(cfg), ranks=2).of("simulated device")
    assert (
        learned is not None and learned.reserved_ratio == learned.allocated_ratio == 1.0
    )  # to the byte


@pytest.mark.exhaustive
def test_what_was_learned_corrects_the_next_prediction(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    changes = {
        **SEARCH,
        "adaptive_batching.rounding": "none",
        "adaptive_batching.search": "predict",
        "adaptive_batching.search_only": True,
        "adaptive_batching.cache": cache,
    }
    wrong = Calibration("simulated device", 1, reserved_ratio=1.5, allocated_ratio=1.0, when=0.0)
    kept = Asked.of(tiny_config("full", tmp_path, **{"adaptive_batching.cache": cache}))
    Calibrations(Calibration, kept, ranks=1).keep(wrong)
    tried = []
    for number in range(2):
        shutil.rmtree(tmp_path / "cache" / "batch_sizes", ignore_errors=True)
        train("full", tmp_path / str(number), **changes)
        tried.append([trial["size"] for trial in written(tmp_path / str(number))["trials"]])
    careful, right = tried[0]  # its first trial showed that predictions were too high by half
    assert careful < right
    assert tried[1] == [right]  # and the next run knew


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("is given no time", "No prediction: no answer within 0 s."),
        ("cannot be started", "No prediction: [Errno 2] No such file"),
        ("ends at once", "No prediction: the planner process ended without an answer"),
        ("cannot trace this", "No prediction: With torch"),
    ],
)
def test_without_a_prediction_the_search_goes_on(fault: str, reason: str, tmp_path: Path) -> None:
    changes = {**SEARCH, "adaptive_batching.search": "predict"}
    cfg = tiny_config("full", tmp_path, **changes, **{"adaptive_batching.search_only": True})
    [said] = run_ranks(run_ours_with_a_predictor_that, 1, fault, cfg, join=False)
    assert reason in said and "Searching without it." in said
    assert [trial["size"] for trial in written(tmp_path)["trials"]][:2] == [1, 2]


def planner_that_ends(*_: Any) -> Any:
    os._exit(0)


def planner_of_another_torch(*about: Any) -> Any:
    from torchtune_adaptive.planner.trace import recorder

    recorder.Recorder.knows = lambda *_: False
    return background.PeakAnswers(*about)


def run_ours_with_a_predictor_that(fault: str, cfg: Any) -> str:
    if fault == "is given no time":
        background.PATIENCE = 0.0
    elif fault == "cannot be started":
        workers.sys.executable = "/no/python"
    elif fault == "ends at once":
        background.PeakAnswers = planner_that_ends
    elif fault == "cannot trace this":
        background.PeakAnswers = planner_of_another_torch
    heard = io.StringIO()
    logging.getLogger("torchtune_adaptive").addHandler(logging.StreamHandler(heard))
    run_ours("full", cfg)
    return heard.getvalue()


@pytest.mark.parametrize(
    ("allowed", "size", "steps", "reason"),
    [
        (
            None,
            2,
            2,
            "a larger one would leave fewer than 2 optimizer steps in an epoch; "
            "adaptive_batching.ceiling=N allows it",
        ),
        (100, 5, 1, "the data has 5 rows per rank, and an epoch needs a step"),
    ],
)
def test_an_epoch_keeps_some_steps_unless_a_ceiling_allows_more(
    allowed: int | None, size: int, steps: int, reason: str, tmp_path: Path
) -> None:
    changes = {
        **SEARCH,
        "dataset.split": "train[:10]",
        "adaptive_batching.rounding": "none",
        "adaptive_batching.ceiling": allowed,
    }
    run = train("full", tmp_path, 2, **{**changes, "epochs": 2})
    found = written(tmp_path)
    assert (found["batch_size"], found["reason"]) == (
        size,
        f"it is the largest size allowed: {reason}",
    )
    assert len(run) == 2 * steps, "in two epochs"


def find_nothing(cfg: Any) -> str:
    with pytest.raises(NothingFits) as raised:
        run_ours("full", cfg)
    return str(raised.value)


def test_nothing_fits_is_an_error_that_helps(tmp_path: Path) -> None:
    changes = {**SEARCH, "adaptive_batching.memory_limit": "3MiB"}
    messages = run_ranks(find_nothing, 2, tiny_config("full", tmp_path, **changes), join=False)
    for message in messages:
        assert "Not even 1 row of 103 tokens" in message
        assert "out of memory in" in message and "could have 3,145,728" in message
        assert "enable_activation_checkpointing" in message and "memory_limit" in message


def test_a_batch_larger_than_the_data_is_an_error(tmp_path: Path) -> None:
    """torchtune trains nothing, saves untrained weights, and exits with 0."""
    said = refused("ConfigError", "full", tmp_path, 2, batch_size=1000)
    assert re.search(r"batch_size: 1000 .* the data has 640.* Lower batch_size", said)
    assert not list(tmp_path.glob("epoch_*"))
