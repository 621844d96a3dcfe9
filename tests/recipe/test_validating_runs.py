"""Runs of the recipes that validate while they train."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import runs
from tests.helpers.recipes import tiny_config
from tests.helpers.runs import RESUME, Records, assert_same_weights
from tests.helpers.validating import VALIDATES, losses, validation_losses
from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.recipe.settings.checks import check
from torchtune_adaptive.recipe.settings.kind_table import KINDS

pytestmark = pytest.mark.runs

DROPOUT = {"full": {"model.attn_dropout": 0.1}, "lora": {"model.lora_dropout": 0.1}}


def train(kind: str, folder: Path, ranks: int, **changes: Any) -> Records:
    quick = {
        "save_every_n_steps": 2,
        "keep_last_n_checkpoints": 9,
        "max_steps_per_epoch": 4,
        **DROPOUT[kind],
    }
    return runs.train(kind, folder, ranks, **{**quick, **changes})


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_validation_changes_no_bit_and_continues_after_a_resume(kind: str, tmp_path: Path) -> None:
    plain, whole, resumed = (tmp_path / name for name in ("plain", "whole", "resumed"))
    expected = train(kind, plain, 2)
    actual = train(kind, whole, 2, **VALIDATES)
    assert losses(actual) == losses(expected) and len(losses(actual)) == 4
    assert list(validation_losses(actual)) == [2, 4]
    assert_same_weights(plain / "epoch_0", whole / "epoch_0")

    shutil.copytree(whole, resumed, symlinks=True)
    for name in ("epoch_0", "epoch_0_step_4"):
        shutil.rmtree(resumed / name)
    rest = train(kind, resumed, 2, **VALIDATES, **RESUME)
    assert losses(rest) == losses(actual)[2:]
    assert validation_losses(rest) == {
        step: loss for step, loss in validation_losses(actual).items() if step > 2
    }


def test_a_trial_finds_the_micro_batch_of_validation(tmp_path: Path) -> None:
    """What is asked for does not fit, so it is made smaller before training, and never runs out there."""
    records = train(
        "full",
        tmp_path,
        2,
        **VALIDATES,
        **{"dataset_val.split": "train[:300]", "batch_size_val": 128},
        **{"use_maximum_batch_size": True, "adaptive_batching.memory_limit": "12MiB"},
    )
    report = json.loads((tmp_path / "batch_size_search.json").read_text())
    assert report["validation"]["fits"] and report["validation"]["size"] < 128
    assert report["validation"]["size"] > report["batch_size"], "it needs no gradients"
    assert list(validation_losses(records)) == [2, 4]
    assert not list(tmp_path.glob("*.jsonl")), "nothing had to change in training"


def test_nothing_to_validate_on() -> None:
    cfg = tiny_config("full", "/nowhere", run_val_every_n_steps=2)
    with pytest.raises(ConfigError, match="dataset_val is not set"):
        check(cfg, KINDS["full"])
