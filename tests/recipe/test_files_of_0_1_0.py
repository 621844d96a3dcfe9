"""Files of version 0.1.0, which was laid out otherwise, still work.

``tests/data/run_of_0.1.0.zip`` was written by two ranks of commit a39f79d, with torch 2.13, torchtune 0.6.1
and torchao 0.15: a checkpoint after 6 of 8 steps, what the search remembered, what the run logged, and a copy
of its recipe.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.recipes import run_ours, run_recipe_at, tiny_config
from torchtune_adaptive.common.cache import libraries

pytestmark = pytest.mark.runs

RUN = {
    "model.lora_rank": 2,
    "batch_size": 1,
    "use_maximum_batch_size": True,
    "batch_increase_function": "torchtune_adaptive.tiny.two_more_rows",
    "adaptive_batching.memory_limit": "16MiB",
    "adaptive_batching.headroom": 0.0,
    "save_adapter_weights_only": True,
    "save_every_n_steps": 2,
    "max_steps_per_epoch": 4,
    "epochs": 2,
    "keep_last_n_checkpoints": 10,
}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.unpack_archive(Path(__file__).parents[1] / "data" / "run_of_0.1.0.zip", tmp_path)
    return tmp_path


def test_a_checkpoint_is_resumed_by_a_recipe_that_was_copied(old: Path) -> None:
    cfg = tiny_config("lora", old / "run", **RUN, resume_from_checkpoint=True)
    copied = str(old / "adaptive_lora_finetune_distributed.py")
    records, *_ = run_ranks(run_recipe_at, 2, copied, cfg, join=False)
    expected = json.loads((old / "records.json").read_text())[6:]
    assert [record["step"] for record in records] == [7, 8]
    for name in ("loss", "lr", "batch_size"):
        # Not to the bit: another processor may have other kernels.
        assert [record[name] for record in records] == pytest.approx(
            [record[name] for record in expected], rel=1e-4
        )


@pytest.mark.exhaustive
def test_what_a_search_remembered_is_used(old: Path) -> None:
    (kept,) = (old / "cache" / "batch_sizes").glob("*.json")
    if json.loads(kept.read_text())["facts"]["libraries"] != libraries():
        pytest.skip(
            "results are remembered for the versions of libraries that they were found with"
        )
    cfg = tiny_config("lora", old / "new", **RUN, **{"adaptive_batching.cache": str(old / "cache")})
    (first, _) = watch_ranks(run_ours, 2, "lora", cfg, until_exit_of=[0, 1], join=False)
    assert "A previous identical run found 4; verifying with one trial." in first.said


def test_modules_that_configs_name() -> None:
    from torchtune_adaptive.tiny import two_more_rows

    from torchtune_adaptive.recipe import tiny as now

    assert two_more_rows is now.two_more_rows
