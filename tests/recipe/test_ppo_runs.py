"""Runs of PPO: two models trained and saved, sizes found, memory run out in each phase, resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torchtune.training import FullModelHFCheckpointer

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import tiny_config
from tests.helpers.runs import RESUME, Records, assert_same_weights, losses, train
from tests.recipe.test_rollout_runs import of_training, run_short_of_memory
from torchtune_adaptive.recipe import tiny

pytestmark = pytest.mark.runs

SHORT: dict[str, Any] = {
    "dataset.split": "train[:16]",
    "batch_size": 8,
    "ppo_batch_size": 4,
    "num_steps": 24,  # of which each epoch has 16
    "max_generated_tokens": 8,
}
OF_TORCHTUNE = """
scores num_stop_tokens rlhf_reward kl kl_reward loss policy_loss value_loss clipfrac ratios
approx_policy_kl response_lengths
"""
PLACES = {"generation": ("_generate", 0.25), "scoring": ("_score", 0.1)}
"""Where memory is short in each phase, and what is left of it."""


def short(ranks: int) -> dict[str, Any]:
    """As many rows on any number of ranks."""
    return {**SHORT, "batch_size": 8 // ranks, "ppo_batch_size": 4 // ranks}


def test_both_models_are_trained_and_saved_where_torchtune_saves_them(tmp_path: Path) -> None:
    records = train("ppo", tmp_path, **{**SHORT, "num_steps": 16, "ppo_epochs": 1})
    assert len(losses(records)) == 4 and set(OF_TORCHTUNE.split()) <= records[0].keys()
    assert all(record["ratios"] == pytest.approx(1.0) for record in records[::2])
    assert records[1]["ratios"] != 1.0 and records[0]["scores"] == records[1]["scores"]
    name = "model-00001-of-00001.safetensors"
    before = {"": tiny.assets(), "value": tiny.assets() / "reward"}
    for model, base in before.items():
        saved, start = load_file(tmp_path / model / "epoch_0" / name), load_file(base / name)
        assert saved.keys() == start.keys()
        assert sum(bool((saved[key] != start[key]).any()) for key in start) > len(start) // 2
    value = FullModelHFCheckpointer(
        checkpoint_dir=str(tmp_path / "value" / "epoch_0"),
        checkpoint_files=[name],
        model_type="REWARD",
        output_dir=str(tmp_path / "unused"),
    )
    assert value.load_checkpoint()["model"]["output.weight"].shape == (1, 64)


@pytest.mark.exhaustive
def test_a_step_depends_on_no_size(tmp_path: Path) -> None:
    sizes = {
        "gradient_accumulation_steps": 4,
        "adaptive_batching.generation_batch_size": 3,
        "adaptive_batching.scoring_batch_size": 5,
    }
    whole, split = (train("ppo", tmp_path / n, **SHORT, **s) for n, s in (("a", {}), ("b", sizes)))
    assert losses(split) == pytest.approx(losses(whole), rel=1e-5) and len(losses(whole)) == 12


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_after_a_search_is_the_run_without_one(ranks: int, tmp_path: Path) -> None:
    limit = {"adaptive_batching.memory_limit": "9MiB", "dataset.split": "train[:64]"}
    more = {**SHORT, **limit, "batch_size": 16, "ppo_batch_size": 8, "num_steps": 32 * ranks}
    searching, plain = (tmp_path / name for name in ("searching", "plain"))
    found = train("ppo", searching, ranks, **more, use_maximum_batch_size=True)
    report = json.loads((searching / "batch_size_search.json").read_text())
    for phase, most in {"generation": 16, "scoring": 16, "training": 8}.items():
        fits = {trial["size"]: trial["fits"] for trial in report["trials"][phase]}
        size = report[f"{phase}_batch_size"]
        assert fits[size] and (size == most or not fits[2 * size])
    assert report["training_batch_size"] < 8
    overrides = dict(each.split("=") for each in report["overrides"].split())
    sizes = {key: int(value) for key, value in overrides.items() if value.isdecimal()}
    assert len(sizes) == 3
    expected = train("ppo", plain, ranks, **more, **sizes)
    assert of_training(found) == of_training(expected) and len(losses(found)) == 8
    assert_same_weights(searching, plain)


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_backward", [False, True], ids=["after", "in backward"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_has_the_same_responses_and_losses(
    ranks: int, in_backward: bool, tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    saving = {"save_every_n_steps": 3, "keep_last_n_checkpoints": 9}
    changes = {**short(ranks), **saving, "optimizer_in_bwd": in_backward}
    expected = train("ppo", whole, ranks, **changes)
    assert len(losses(expected)) == 12
    saved = sorted(path.name for path in whole.glob("epoch_*"))
    # Step 3 is in the middle of a rollout, which is not left before it has been trained on.
    assert saved == ["epoch_0", "epoch_0_step_4", "epoch_0_step_8", "epoch_1_step_12"]
    assert saved == sorted(path.name for path in (whole / "value").glob("epoch_*"))
    for kept, left in ((["epoch_0_step_4"], 8), (["epoch_0_step_4", "epoch_0_step_8"], 4)):
        shutil.rmtree(resumed, ignore_errors=True)
        shutil.copytree(whole, resumed, symlinks=True)
        for name in {*saved} - {*kept}:
            shutil.rmtree(resumed / name)
        rest = train("ppo", resumed, ranks, **changes, **RESUME)
        assert of_training(rest) == of_training(expected)[-left:]
        assert_same_weights(whole / saved[-1], resumed / saved[-1])
    assert losses(train("ppo", resumed, ranks, **changes, **RESUME)) == []


KILLED = """
import os, signal
from tests.helpers.recipes import run_ours, tiny_config
from torchtune_adaptive.recipe.train.rollouts import Rollouts
score = Rollouts._score
def killed(self, rows):
    if self._number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    score(self, rows)
Rollouts._score = killed
run_ours("ppo", tiny_config("ppo", {folder!r}, **{changes!r}))
"""


@pytest.mark.exhaustive
def test_a_killed_run_is_resumed(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = train("ppo", whole, **SHORT)
    program = KILLED.format(folder=str(killed), changes=SHORT)
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, timeout=120).returncode == -9
    rest = train("ppo", killed, **SHORT, **RESUME)
    assert of_training(rest) == of_training(expected)[8:]
    assert_same_weights(whole / "epoch_1_step_12", killed / "epoch_1_step_12")


@pytest.mark.exhaustive
@pytest.mark.parametrize("phase", PLACES)
def test_memory_that_runs_out_on_one_rank_changes_no_response(phase: str, tmp_path: Path) -> None:
    changes = {**SHORT, "batch_size": 32, "ppo_batch_size": 16, "dataset.split": "train[:192]"}
    changes |= {"num_steps": 192, "gradient_accumulation_steps": 4, "ppo_epochs": 1}
    limit = {"adaptive_batching.memory_limit": "16MiB"}
    made: list[Records] = []
    place, factor = PLACES[phase]
    for name, which in (("plain", None), ("short", place)):
        cfg = tiny_config("ppo", tmp_path / name, **changes, **limit)
        records, *_ = run_ranks(
            run_short_of_memory, 2, "ppo", cfg, which, factor, join=False, timeout=120
        )
        made.append(records)
    plain, short = made
    assert len(plain) == 6
    for one, other in zip(plain, short, strict=True):
        assert one["response_lengths"] == other["response_lengths"]
        for key in ("scores", "loss"):
            assert other[key] == pytest.approx(one[key], rel=1e-5, abs=1e-7)
    events = (tmp_path / "short" / "batch_size_events.jsonl").read_text()
    assert f'"{phase}_batch": [32, 16]' in events and "on rank 1" in events


@pytest.mark.exhaustive
def test_a_step_that_runs_out_of_memory_on_two_ranks_is_retried(tmp_path: Path) -> None:
    rows = {
        **SHORT,
        "batch_size": 16,
        "ppo_batch_size": 8,
        "num_steps": 32,
        "dataset.split": "train[:32]",
    }
    plain = train("ppo", tmp_path / "plain", 2, **rows)
    less = {"adaptive_batching": {"memory_limit": "9MiB", "on_out_of_memory": "shrink"}}
    short = train("ppo", tmp_path / "short", 2, **rows, **less)
    assert short[-1]["retried_steps"] >= 1
    assert losses(short) == pytest.approx(losses(plain), rel=1e-4)
