"""A run that chooses its fastest configuration has that on record, and its record makes the same run."""

from __future__ import annotations

import json
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.helpers.ranks import watch_ranks
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import ALL_KEPT, RESUME, assert_same_records, run_with, train, undisturbed
from torchtune_adaptive.core.step.knobs import CHECKPOINT, COMPILE
from torchtune_adaptive.recipe.plan import background
from torchtune_adaptive.recipe.registry import with_overrides
from torchtune_adaptive.recipe.settings.keys import FOUND
from torchtune_adaptive.recipe.settings.knob_table import FUSED

pytestmark = pytest.mark.runs

CHOOSES = {
    "use_fastest_configuration": True,
    "adaptive_batching.may_change": "rounding",
    "adaptive_batching.memory_limit": "16MiB",  # which the config's own values do not fit into
    "adaptive_batching.speed_trials": 1,
    "batch_size": 8,
    "max_steps_per_epoch": 2,
    "epochs": 1,
    "metric_logger._component_": "torchtune.training.metric_logging.DiskLogger",
}


def run_of_kind_without_waiting(kind: str, cfg: DictConfig) -> list[dict[str, float]]:
    background.PATIENCE = 0.0
    return run_ours(kind, cfg)


def run_without_waiting_for_a_prediction(cfg: DictConfig) -> None:
    run_of_kind_without_waiting("full", cfg)


def run(cfg: DictConfig, *said: str) -> Path:
    """Run it; where it is, and whether it says all of this."""
    (rank,) = watch_ranks(
        run_without_waiting_for_a_prediction, 1, cfg, until_exit_of=[0], join=False
    )
    assert rank.exit_code == 0 and all(words in rank.said for words in said), rank.said
    return Path(cfg.output_dir)


def test_what_was_chosen_is_on_record_and_makes_the_same_run(tmp_path: Path) -> None:
    given = tiny_config("full", tmp_path / "chose", **CHOOSES)
    folder = run(given, "as configured: micro-batch 8: out of mem", " ms a step, in 4 timed steps")
    found = json.loads((folder / "fastest_configuration.json").read_text())
    changed = {change["key"]: change["new"] for change in found["changes"]}
    assert CHECKPOINT in changed or "batch_size" in changed, "it had to change something"

    saved = OmegaConf.load(folder / "torchtune_config.yaml")
    assert isinstance(saved, DictConfig)
    numbers = saved.pop(FOUND)
    assert saved == with_overrides(given, found["overrides"].split())
    assert {key: OmegaConf.select(saved, key) for key in changed} == changed
    assert numbers.global_batch_size == found["global_batch_size"] == 8
    assert numbers.batch_size == saved.batch_size and numbers.trials == len(found["trials"])
    (searched,) = logged(folder, "search/")
    assert float(searched["batch_size"]) == saved.batch_size

    page = unescape((folder / "report.html").read_text())
    search = page[page.index("<h2>Search</h2>") : page.index("<h2>Training and memory</h2>")]
    assert "There was no" not in page and "Timed steps of the data's first rows" in search
    assert all(f"{key}: " in search for key in changed) and found["overrides"] in search
    assert len(re.findall("<tr><td>", search)) == len(found["timed"])

    again = run(OmegaConf.merge(saved, {"output_dir": str(tmp_path / "again")}))
    assert "There was no search" in (again / "report.html").read_text()
    assert [step["loss"] for step in logged(again)] == [step["loss"] for step in logged(folder)]


def logged(folder: Path, prefix: str = "") -> list[dict[str, Any]]:
    """What torchtune's logger has written of the search, or else of the steps."""
    (path,) = (folder / "logs").iterdir()
    lines = path.read_text().splitlines()
    kept = [line for line in lines if ("search/" in line) == bool(prefix)]
    return [dict(re.findall(rf"{prefix}(\w+):(\S+)", line)) for line in kept]


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
def test_split_layers_are_trained_in_the_way_that_was_chosen(ranks: int, tmp_path: Path) -> None:
    """Alone, and with FSDP: the rows of a step are counted once, and the choice makes the same run."""
    split = {
        "tensor_parallel_dim": 2,
        "tensor_parallel_plan._component_": "torchtune.models.llama3.base_llama_tp_plan",
        "optimizer.foreach": False,
        "shuffle": False,
        "adaptive_batching.memory_limit": "9MiB",
        "adaptive_batching.may_change": "exact",
        "metric_logger._component_": "tests.helpers.recipes.Recorder",
    }
    cfg = tiny_config("full", tmp_path / "chose", **{**CHOOSES, **split})
    chose = run_with(run_of_kind_without_waiting, "full", cfg, ranks)
    (found,) = (tmp_path / "chose").glob("**/fastest_configuration.json")
    report = json.loads(found.read_text())
    changed = {change["key"]: change["new"] for change in report["changes"]}
    assert changed and not changed.keys() & {COMPILE, FUSED}
    assert report["global_batch_size"] == chose[0]["global_batch_size"] == 8 * ranks // 2
    same = {**CHOOSES, **split, **changed, "use_fastest_configuration": False}
    again = train("full", tmp_path / "again", ranks, **same)
    assert [step["loss"] for step in again] == [step["loss"] for step in chose]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_some_layers_are_checkpointed_bit_for_bit_and_resumed(kind: str, tmp_path: Path) -> None:
    """Also where a resumed run checkpoints others than the run before it."""
    stopped = {"save_every_n_steps": 2, "max_steps_per_epoch": 3, **ALL_KEPT}
    _, expected = undisturbed(kind, **stopped)
    some = train(kind, tmp_path / "some", **stopped, **{CHECKPOINT: "3_of_4"})
    assert_same_records(some, expected)
    for path in (tmp_path / "some").glob("*epoch_*"):
        if path.name != "epoch_0_step_2":
            shutil.rmtree(path)
    for checkpointing in ("3_of_4", "1_of_4"):
        folder = tmp_path / checkpointing
        shutil.copytree(tmp_path / "some", folder, symlinks=True)
        again = train(kind, folder, **stopped, **RESUME, **{CHECKPOINT: checkpointing})
        assert_same_records(again, expected[2:])
