"""Whole runs in which something goes wrong in training."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from torchtune.data import padded_collate_sft

from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.recipes import run_ours, run_recipe_at, tiny_config
from tests.helpers.runs import named_checkpoint, train
from torchtune_adaptive.common.errors import TrainingOutOfMemory, UsageError
from torchtune_adaptive.core.ranks.watchdog import EXIT_CODE
from torchtune_adaptive.core.step import train_step
from torchtune_adaptive.recipe.registry import with_overrides

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

LONG_ENOUGH = {"epochs": 2, "batch_size": 8, "max_steps_per_epoch": None, "clip_grad_norm": 1.0}


@pytest.mark.exhaustive
def test_a_neighbour_moves_in_and_out_and_the_losses_stay(tmp_path: Path) -> None:
    """What ``make demo-oom`` shows."""
    limited = {"adaptive_batching.memory_limit": "30MiB", "adaptive_batching.grow_back_after": 10}
    shrinking = {**LONG_ENOUGH, **limited, "adaptive_batching.on_out_of_memory": "shrink"}
    disturbed, *_ = run_ranks(
        run_recipe_at,
        2,
        "demos/neighbour.py",
        tiny_config("full", tmp_path / "disturbed", **shrinking),
        join=False,
    )
    plain = train("full", tmp_path / "plain", 2, **LONG_ENOUGH)
    assert len(plain) == len(disturbed) == 80
    for one, other in zip(plain, disturbed, strict=True):
        assert one["lr"] == other["lr"]
        assert one["loss"] == other["loss"], "more checkpointing changes no bit"
    assert {int(record["micro_batch_size"]) for record in disturbed} == {8}
    assert disturbed[-1]["retried_steps"] == 2, "once at first, once when it tried to grow back"
    assert 0 < disturbed[-1]["memory_unused_share"] < 1 and disturbed[-1]["alloc_retries"] == 0
    rows = (tmp_path / "disturbed" / "batch_size_events.jsonl").read_text().splitlines()
    events = [json.loads(row) for row in rows]
    there, back = ["none", "all"], ["all", "none"]
    assert [event["activation_checkpointing"] for event in events] == [there, back, there, back]
    assert events[0]["step"] > 20 and " on rank 0" in events[0]["reason"]


def run_beside_a_neighbour(cfg: Any) -> str:
    with pytest.raises(TrainingOutOfMemory) as raised:
        run_recipe_at("demos/neighbour.py", cfg)
    return str(raised.value)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_the_optimizer_in_backward_can_only_stop(ranks: int, tmp_path: Path) -> None:
    searching = {"use_maximum_batch_size": True, "adaptive_batching.memory_limit": "30MiB"}
    changes = {"optimizer_in_bwd": True, "max_steps_per_epoch": None, **searching}
    cfg = tiny_config("full", tmp_path, **changes)
    for said in run_ranks(run_beside_a_neighbour, ranks, cfg, join=False):
        assert "adaptive_batching.headroom" in said and re.search(r"[sS]tep 2\d", said)


def test_without_a_search_a_step_is_retried_and_the_end_says_what_to_set(tmp_path: Path) -> None:
    small = {"batch_size": 16, "adaptive_batching.memory_limit": "12MiB", "max_steps_per_epoch": 2}
    cfg = tiny_config("full", tmp_path / "retried", **small)
    (rank,) = watch_ranks(run_ours, 1, "full", cfg, until_exit_of=[0], join=False)
    assert rank.exit_code == 0, rank.said
    (parts,) = re.findall(r"Last global batch: 16 rows \((.*)\)", rank.said)
    (overrides,) = re.findall(r"^Memory ran out, .* Next time: (.*)$", rank.said, re.MULTILINE)
    again = with_overrides(cfg, [*overrides.split(), f"output_dir={tmp_path / 'again'}"])
    assert again.batch_size * again.gradient_accumulation_steps == 16
    split = f"{again.batch_size} x accumulation {again.gradient_accumulation_steps} x 1 rank"
    assert (
        parts == f"micro-batch {split}"
        and "adaptive_batching.activation_checkpointing=all" in overrides
    )
    steps, *_ = run_ranks(run_ours, 1, "full", again, join=False)
    assert [step["retried_steps"] for step in steps] == [0, 0]


def train_what_cannot_be_reset(cfg: Any) -> list[dict[str, float]]:
    def refuse(*_: Any) -> None:
        raise UsageError("model: it cannot be reset.")

    train_step.require_supported = refuse  # type: ignore[attr-defined]
    return run_ours("full", cfg)


@pytest.mark.parametrize("asked", [False, True], ids=["by default", "asked for"])
def test_a_model_that_recovery_does_not_support(asked: bool, tmp_path: Path) -> None:
    changes = {"adaptive_batching.on_out_of_memory": "shrink"} if asked else {}
    cfg = tiny_config("full", tmp_path, **changes)
    (rank,) = watch_ranks(train_what_cannot_be_reset, 1, cfg, until_exit_of=[0], join=False)
    trained = "cannot be retried: model: it cannot be reset.\n" in rank.said
    refused = "UsageError: model: it cannot be reset." in rank.said
    assert (trained, refused) == (not asked, asked), rank.said
    assert rank.exit_code == int(asked)
    assert (tmp_path / "epoch_0").is_dir() is not asked


brought = 0


def die_in_the_second_epoch(rows: list[Any], **settings: Any) -> dict[str, Any]:
    """A collate function that kills rank 1 in step 5; the check of labels was its first call."""
    global brought
    brought += 1
    if brought == 6 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return padded_collate_sft(rows, **settings)  # type: ignore[return-value]


def test_a_rank_that_dies_in_training_is_named_and_the_run_resumes(tmp_path: Path) -> None:
    changes = {
        "adaptive_batching.on_out_of_memory": "shrink",
        "adaptive_batching.rank_timeout": 10,
        "epochs": 2,
    }
    lethal = {**changes, "collate_fn": f"{__name__}.{die_in_the_second_epoch.__name__}"}
    survivor, _ = watch_ranks(
        run_ours,
        2,
        "full",
        tiny_config("full", tmp_path, **lethal),
        until_exit_of=[0],
        join=False,
    )
    assert survivor.exit_code in (EXIT_CODE, 1), survivor.said
    assert "rank 1" in survivor.said and "step 5 in micro-batches of 4 rows" in survivor.said

    resumed = train("full", tmp_path, 2, **changes, **named_checkpoint("full"))
    assert [record["step"] for record in resumed] == [4, 5, 6]
