"""Ranks that a resumed run cannot use: they wait, and the others train what all would have trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers.launched import launch, losses
from tests.helpers.recipes import quantised, tiny_config
from tests.helpers.runs import RESUME, after, stopped_after, undisturbed
from torchtune_adaptive.common import launcher
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.idle import usable_ranks

PLAN = {"tensor_parallel_plan._component_": "torchtune.models.llama3.base_llama_tp_plan"}
TENSORS: dict[str, Any] = {"tensor_parallel_dim": 2, **PLAN}


@pytest.mark.parametrize(
    ("changes", "usable"),
    [
        ({}, {1: 1, 3: 3, 7: 7}),
        (TENSORS, {1: 1, 2: 2, 3: 2, 5: 4, 6: 4, 7: 4, 8: 8}),  # whose weights have 2^n rows
        ({"tensor_parallel_dim": 4, **PLAN}, {3: 3, 4: 4, 7: 4, 8: 8, 13: 8}),
        ({"context_parallel_dim": 2}, {1: 1, 3: 2, 6: 6, 7: 6}),
        ({"data_parallel_replicate_dim": 2}, {5: 4, 6: 6, 7: 6}),
    ],
)
def test_as_many_ranks_are_used_as_a_config_can_be_divided_over(
    changes: dict[str, Any], usable: dict[int, int]
) -> None:
    asked = Asked.of(tiny_config("full", "unused", **changes))
    assert {ranks: usable_ranks(asked, ranks) for ranks in usable} == usable


def test_the_rows_of_quantized_weights_come_out_even(tmp_path: Path) -> None:
    asked = Asked.of(tiny_config("lora", "unused", **quantised(tmp_path)))
    found = [usable_ranks(asked, ranks) for ranks in range(1, 10)]
    assert found == [1, 2, 2, 4, 4, 4, 4, 8, 8]


@pytest.mark.parametrize(
    ("local_rank", "local_size", "rank", "usable", "here"),
    [(0, 8, 0, 6, 6), (1, 2, 3, 5, 2), (0, 2, 4, 5, 1)],
)
def test_a_process_sees_the_used_ranks_only(
    local_rank: int,
    local_size: int,
    rank: int,
    usable: int,
    here: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size, "RANK": rank}
    for name, value in {**values, "WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    launcher.use_first(usable)
    assert (launcher.size(), launcher.local_size()) == (usable, here)


@pytest.mark.runs
@pytest.mark.exhaustive
@pytest.mark.parametrize("fails", [False, True], ids=["to the end", "a failing run"])
def test_idle_ranks_wait_until_the_run_is_over(fails: bool, tmp_path: Path) -> None:
    changes = {**TENSORS, "save_every_n_steps": 1, "keep_last_n_checkpoints": 9}
    whole, expected = undisturbed("full", 2, **changes)
    stopped = stopped_after(1, whole, tmp_path / "out")
    cfg = tiny_config("full", stopped, **changes, **RESUME)
    cfg.metric_logger = {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": "${output_dir}/logs",
    }
    if fails:
        cfg.dataset.data_files = "nowhere.json"
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    said = launch(
        *("tune", "run", "--nproc_per_node", "3", "adaptive_full_finetune_distributed"),
        *("--config", "config.yaml"),
        cwd=tmp_path,
        expect=int(fails),
    )
    assert "2 ranks of 3 are used, and rank 2 idle: the model, with tensor_parallel_dim=2," in said
    if not fails:
        steps = [record["loss"] for record in after(1, expected)]
        assert losses(stopped) == pytest.approx(steps, rel=1e-6)
