"""Plans of real trainers take what they took with the versions that the numbers are of."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.program_commands import MODEL, plan, run
from tests.helpers.trainer_cases import CASES

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
PEAKS = json.loads((ROOT / "tests" / "data" / "trainer_peaks.json").read_text())
KINDS = json.loads((ROOT / "tests" / "data" / "trainer_kinds.json").read_text())
PARTS = 20
"""A few cases each, as a case takes half a minute."""
OF_OTHERS = ("galore", "apollo", "schedule_free", "grokadamw", "torch_4bit", "torch_8bit")
"""Optimizers of packages that are not there."""
NAMES = [*PEAKS]


def allocated(python: Path, folder: Path, names: list[str]) -> dict[str, int]:
    for name in ("real_programs.py", "trainer_cases.py"):
        shutil.copy(HELPERS / name, folder)
    done = subprocess.run(
        [python, "real_programs.py", *names],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.exhaustive
@pytest.mark.runs
@pytest.mark.parametrize("part", range(PARTS))
def test_trainers_take_what_they_took(part: int, beside_trl: Path, tmp_path: Path) -> None:
    names = NAMES[part::PARTS]
    for name, found in allocated(beside_trl, tmp_path, names).items():
        assert found == pytest.approx(PEAKS[name]["run"], rel=0.001), name


@pytest.mark.exhaustive
@pytest.mark.runs
@pytest.mark.parametrize("part", range(PARTS))
def test_kinds_of_training_take_what_they_took(part: int, beside_trl: Path, tmp_path: Path) -> None:
    there = [
        name
        for name, peaks in KINDS.items()
        if not isinstance(peaks, str) and not any(other in name for other in OF_OTHERS)
    ]
    names, output = there[part::PARTS], tmp_path / "found.jsonl"
    done = run(beside_trl, tmp_path, "-m", "tests.helpers.trainer_kinds", str(output), *names)
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(json.loads(line) for line in output.read_text().splitlines())
    assert found.keys() == {*names}
    for name, peaks in found.items():
        planned, whole = map(int, peaks.split())
        assert planned == pytest.approx(whole, rel=0.005), name
        assert planned == pytest.approx(KINDS[name][0], rel=0.001), name


def test_the_page_has_these_numbers() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make" / "trainer_peaks.py"))["page"]
    assert page() == (ROOT / "docs" / "results" / "trainers.md").read_text()
    assert PEAKS.keys() <= CASES.keys()


OVER_RANKS = """
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

row = dict.fromkeys(("input_ids", "labels"), [5] * 128)
model = AutoModelForCausalLM.from_pretrained("model", dtype="bfloat16", {how})
how = dict(save_strategy="no", report_to="none", bf16=True)
arguments = TrainingArguments("out", per_device_train_batch_size=4, **how)
Trainer(model=model, args=arguments, train_dataset=Dataset.from_list([row] * 64)).train()
"""


@pytest.mark.exhaustive
@pytest.mark.runs
@pytest.mark.parametrize(
    ("how", "ranks", "holders"),
    [
        ("tp_plan='auto'", 2, 2),
        ("distributed_config={'fsdp_size': 2}", 2, 1),
        ("distributed_config={'fsdp_size': 2, 'tp_size': 2}", 4, 2),
    ],
    ids=["tensors", "fsdp", "both"],
)
def test_transformers_splits_a_model_over_ranks(
    how: str, ranks: int, holders: int, beside_trl: Path, tmp_path: Path
) -> None:
    """Each holds its share of all matrices, and ranks that share those have the same rows."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "train.py").write_text(OVER_RANKS.format(how=how))
    found = plan(beside_trl, tmp_path, "train.py", "--nproc", str(ranks))
    width, layers, words = (
        MODEL[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")
    )
    of_layer = 4 * width**2 + 3 * width * MODEL["intermediate_size"]
    matrices = 2 * (2 * width * words + layers * of_layer)
    parts = found["peak"]["parts"]
    assert parts["parameters"] == pytest.approx(matrices / ranks, rel=0.01)
    assert parts["optimizer state"] == pytest.approx(2 * matrices / ranks, rel=0.01)
    speed = found["speed"]
    own = 4 * 128 / speed["seconds"]
    assert speed["tokens_per_second_per_gpu"] == pytest.approx(own / holders)


@pytest.mark.exhaustive
@pytest.mark.runs
def test_a_model_whose_layers_are_on_several_ranks_is_refused(
    beside_trl: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "train.py").write_text(OVER_RANKS.format(how="distributed_config={'pp_size': 2}"))
    done = run(beside_trl, tmp_path, "-m", "torchtune_adaptive", "plan", "train.py", "--nproc", "2")
    assert done.returncode and "pp_size: 2, but a model whose layers" in done.stderr
