"""Plans of trainers' steps from remembered traces: the same answers, without torch and without a trace."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.torchvision import without_torchvision
from torchtune_adaptive.library import Plan, TransformersRollouts, TransformersStep
from torchtune_adaptive.library.kept_steps import TRAINED, KeptSteps

CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    (found / "config.json").write_text(json.dumps(CONFIG))
    return found


def step(folder: Path, **settings: Any) -> TransformersStep:
    given = {"max_length": 2100, "per_device_train_batch_size": 2, **settings}
    return TransformersStep(folder=str(folder), **given)


@pytest.fixture(scope="module")
def first(folder: Path) -> Plan:
    """The first answer, which has taken a trace."""
    assert step(folder).remembered("4090", "2GiB", cache=str(folder)) is None
    with without_torchvision():
        return step(folder).plan("4090", "2GiB", cache=str(folder), timeout=300)


def test_the_same_question_has_the_same_answer(folder: Path, first: Plan) -> None:
    assert step(folder).remembered("4090", "2GiB", cache=str(folder)) == first
    assert not first.unchecked and first.largest > 3


@pytest.mark.alternating
def test_another_gpu_and_other_rows_take_no_trace(folder: Path, first: Plan) -> None:
    other = step(folder, per_device_train_batch_size=7, gradient_accumulation_steps=1)
    found = other.remembered("h100", "3GiB", cache=str(folder))
    assert found is not None and found.rows == 7 and found.largest > first.largest
    assert f"checked at {first.largest} rows, and not traced itself" in found.unchecked
    with without_torchvision():
        traced = other.plan("h100", "3GiB", cache=False, timeout=300)
    assert replace(found, unchecked="") == traced


def test_what_a_step_depends_on_takes_a_trace(folder: Path, first: Plan, tmp_path: Path) -> None:
    for settings in ({"max_length": 2200}, {"lora": True}, {"gradient_accumulation_steps": 2}):
        other = step(folder, **settings)
        assert other.remembered("4090", "2GiB", cache=str(folder)) is None, settings
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 4}))
    assert step(tmp_path).remembered("4090", "2GiB", cache=str(folder)) is None
    assert step(folder).remembered("4090", "2GiB", cache=False) is None


def test_a_size_that_does_not_follow_from_others_checks_nothing(folder: Path, first: Plan) -> None:
    question = step(folder)._question("4090", "2GiB", 1 << 14, 0.05, str(folder))
    steps = KeptSteps(question, may_trace=False)
    assert steps.checked(TRAINED, 3) == [first.largest]
    steps.note_irregular(TRAINED)
    assert not steps.checked(TRAINED, 3)


def test_what_is_damaged_is_not_used(
    folder: Path, first: Plan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (kept,) = (folder / "traces").glob("*.json")
    (tmp_path / "traces").mkdir()
    entry = json.loads(kept.read_text())
    for damaged in (kept.read_text()[:-9], json.dumps({**entry, "value": {"steps": {}}}), "[]"):
        caplog.clear()
        (tmp_path / "traces" / kept.name).write_text(damaged)
        assert step(folder).remembered("4090", "2GiB", cache=str(tmp_path)) is None
        assert "Ignoring cached traces" in caplog.text


class Own(TransformersStep):
    """A step with code that no fingerprint covers."""


@pytest.mark.alternating
def test_code_of_others_is_not_remembered(folder: Path, tmp_path: Path) -> None:
    own = Own(folder=str(folder), max_length=64)
    with without_torchvision():
        own.plan("4090", "2GiB", cache=str(tmp_path), timeout=300)
    assert own.remembered("4090", "2GiB", cache=str(tmp_path)) is None
    assert not [*tmp_path.iterdir()]


@pytest.mark.alternating
def test_phases_are_remembered(folder: Path) -> None:
    def rollouts(**settings: Any) -> TransformersRollouts:
        given = {"max_prompt_length": 16, "max_completion_length": 48, **settings}
        return TransformersRollouts(folder=str(folder), **given)

    asked: dict[str, Any] = {"gpu": "h100", "memory": "2GiB", "cache": str(folder)}
    assert rollouts().remembered(**asked) is None
    with without_torchvision():
        found = rollouts().plan(**asked, timeout=300)
    assert rollouts().remembered(**asked) == found
    assert rollouts(beta=0.1).remembered(**asked) is None


def test_a_remembered_answer_needs_no_torch(folder: Path, first: Plan) -> None:
    program = f"""
import sys
from torchtune_adaptive.cli import transformers_plan
from torchtune_adaptive.library import TransformersStep
step = TransformersStep(folder={str(folder)!r}, max_length=2100, per_device_train_batch_size=2)
assert step.remembered("4090", "2GiB", cache={str(folder)!r}).largest == {first.largest}
assert step.about()
assert not {{"torch", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_that_transformers_is_missing_is_said_before_torch_is_imported(folder: Path) -> None:
    program = f"""
import argparse, importlib.util, sys
from torchtune_adaptive.library import transformers_step
from torchtune_adaptive.cli.plan_options import add_arguments, parsed, plan_command
transformers_step.find_spec = lambda name: None
parser = argparse.ArgumentParser()
add_arguments(parser)
words = ["--hf", {str(folder)!r}, "--trainer", "SFTTrainer", "--gpu", "4090"]
assert plan_command(parsed(parser, words)) == 2
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=120, capture_output=True, text=True
    )
    assert "transformers is not installed" in done.stderr
