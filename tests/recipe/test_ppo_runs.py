"""Runs of PPO: two models trained and saved, sizes found, memory run out in each phase, resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_torchtunes, tiny_config
from tests.helpers.rollout_runs import of_training, run_short_of_memory
from tests.helpers.runs import RESUME, Records, assert_same_weights, losses, run_with, train
from torchtune_adaptive.recipe import tiny

pytestmark = pytest.mark.runs

SHORT: dict[str, Any] = {
    "dataset.split": "train[:16]",
    "batch_size": 8,
    "ppo_batch_size": 4,
    "num_steps": 24,  # of which each epoch has 16
    "max_generated_tokens": 8,
}
COMPARED = """
scores num_stop_tokens rlhf_reward kl kl_reward loss policy_loss value_loss clipfrac
"""
"""What torchtune logs, too; of ratios its means include padding."""
WEIGHTS = "model-00001-of-00001.safetensors"
PLACES = {"generation": ("_generate", 0.25), "scoring": ("_score", 0.1)}
"""Where memory is short in each phase, and what is left of it."""


def short(ranks: int) -> dict[str, Any]:
    """As many rows on any number of ranks."""
    return {**SHORT, "batch_size": 8 // ranks, "ppo_batch_size": 4 // ranks}


@pytest.mark.rotating
@pytest.mark.parametrize("stops", [[*range(300, 360)], None], ids=["stopping", "to the end"])
def test_training_is_torchtunes(stops: list[int] | None, tmp_path: Path) -> None:
    """Where nothing is drawn, and a step is a whole rollout in one micro-batch; also what is saved."""
    changes = {
        **{**SHORT, "ppo_batch_size": 8, "forward_batch_size": 8, "num_steps": 16},
        **{"top_k": 1, "shuffle": False, "stop_token_ids": stops},
        **{"penalise_no_eos": stops is not None, "min_response_length": 5},
    }
    ours = train("ppo", tmp_path / "ours", **changes)
    changes["min_response_length"] -= 1  # theirs is less than one token shorter
    cfg = tiny_config("ppo", tmp_path / "theirs", **changes)
    theirs = run_with(run_torchtunes, "ppo", cfg, 1)
    assert len(theirs) == 2 and len(ours) == 4
    assert (theirs[1]["num_stop_tokens"] > 0) == (stops is not None)
    for number, their in enumerate(theirs):
        steps = ours[2 * number : 2 * number + 2]  # of which theirs are means
        for key in COMPARED.split():
            mean = sum(step[key] for step in steps) / 2
            assert mean == pytest.approx(their[key], rel=1e-4, abs=1e-5), key
        assert steps[0]["response_lengths"] == their["response_lengths"] + 1
    for model, base in (("", tiny.assets()), ("value", tiny.assets() / "reward")):
        one, other = (tmp_path / run / model / "epoch_0" for run in ("ours", "theirs"))
        mine, expected, before = (load_file(folder / WEIGHTS) for folder in (one, other, base))
        assert mine.keys() == expected.keys() == before.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(mine[name], weight, rtol=0.0, atol=1e-4)
        assert sum(bool((mine[name] != before[name]).any()) for name in before) > len(before) // 2


@pytest.mark.exhaustive
def test_a_step_depends_on_no_size(tmp_path: Path) -> None:
    sizes = {
        "gradient_accumulation_steps": 4,
        "adaptive_batching.generation_batch_size": 3,
        "adaptive_batching.scoring_batch_size": 5,
    }
    in_tokens = {"token_budget": 130, "scoring_token_budget": 200}
    budgets = {f"adaptive_batching.{key}": tokens for key, tokens in in_tokens.items()}
    # In fp32, gradients that are summed in another order change later losses, which are near zero, by more.
    changes = {**SHORT, "num_steps": 8, "stop_token_ids": [*range(60)], "dtype": "fp64"}
    whole, *split = (
        train("ppo", tmp_path / name, **changes, **each)
        for name, each in (("whole", {}), ("rows", sizes), ("tokens", budgets))
    )
    assert len(losses(whole)) == 4
    for each in split:
        assert losses(each) == pytest.approx(losses(whole), rel=1e-5)


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
    assert subprocess.run([sys.executable, "-c", program], cwd=root, timeout=300).returncode == -9
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
        records, *_ = run_ranks(run_short_of_memory, 2, "ppo", cfg, which, factor, join=False)
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
