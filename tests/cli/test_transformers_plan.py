"""``plan --hf``: settings in the trainers' words, and the program that trains so; nothing is run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hugging_face import LLAMA_1B, written
from torchtune_adaptive.cli.hub import model_of
from torchtune_adaptive.cli.plan_options import add_arguments, parsed, plan_command
from torchtune_adaptive.cli.program_plan import AskedProgram
from torchtune_adaptive.cli.transformers_plan import asked_trainer
from torchtune_adaptive.library import transformers_step
from torchtune_adaptive.planner import gpus


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parsed(parser, words)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_step, "find_spec", lambda name: name)


def asked(folder: Path, *words: str, ranks: int = 1) -> AskedProgram:
    model = model_of(str(written(folder, LLAMA_1B)))
    return asked_trainer(given("--hf", str(model.folder), *words), model, gpus.gpu("h100"), ranks)


def trained(one: AskedProgram) -> dict[str, Any]:
    """What the program is told."""
    found: dict[str, Any] = json.loads(one.program.words[2])
    return found


@pytest.mark.usefixtures("installed")
def test_settings_are_the_trainers_own(tmp_path: Path) -> None:
    words = ("--trainer", "DPOTrainer", "dtype=bfloat16", "target_modules=q_proj,v_proj", "r=16")
    words += ("per_device_train_batch_size=4", "gradient_checkpointing=false", "optim=sgd")
    found = asked(tmp_path, "--method", "lora", "--seq-len", "512", *words, ranks=2)
    told = trained(found)
    assert (told["trainer"], told["dtype"], told["r"]) == ("DPOTrainer", "bfloat16", 16)
    assert told["lora"] is True and told["target_modules"] == ["q_proj", "v_proj"]
    assert told["max_length"] == 512 and told["gradient_checkpointing"] is False
    assert "per_device_train_batch_size" not in told, "what is remembered serves any number of rows"
    assert (found.program.rows, found.program.ranks) == (4, 2)
    assert found.program.name == "DPOTrainer"


@pytest.mark.usefixtures("installed")
def test_a_model_alone_is_trained_by_sft_trainer(tmp_path: Path) -> None:
    found = asked(tmp_path)
    assert trained(found) == {
        "folder": str(tmp_path),
        "trainer": "SFTTrainer",
        "max_length": 1024,
    }
    assert found.program.rows == 8
    assert trained(asked(tmp_path, "--method", "qlora"))["load_in_4bit"] is True


@pytest.mark.usefixtures("installed")
def test_a_trainer_that_generates_has_its_own_rows(tmp_path: Path) -> None:
    words = ("--trainer", "GRPOTrainer", "--seq-len", "300", "per_device_train_batch_size=16")
    found = asked(tmp_path, *words)
    assert found.program.rows is None
    assert trained(found)["per_device_train_batch_size"] == 16
    assert trained(found)["max_prompt_length"] == 300


@pytest.mark.usefixtures("installed")
def test_what_is_typed_and_what_a_page_changes(tmp_path: Path) -> None:
    found = asked(tmp_path, "--method", "lora", "r=16", "max_length=64")
    folder = str(tmp_path)
    assert found.command == ("--hf", folder, "--method", "lora", "r=16")
    other = found.with_settings(max_length=128)
    assert json.loads(other.words[2])["max_length"] == 128 and other.rows == found.program.rows


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["lora_rank"], "'lora_rank' is not an override"),
        (["trainer=DPOTrainer"], "'trainer=DPOTrainer' is said by an option"),
        (["--fastest"], "--fastest: 'True' is not for a program"),
        (["--compare", "h100-80gb,nothing"], "--compare: 'nothing' "),
        (["--rows", "0"], "per_device_train_batch_size: 0 is not a number of rows"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_what_cannot_be_asked(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_command(given("--hf", str(written(tmp_path, LLAMA_1B)), *words)) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (["--trainer", "Trainer"], "accelerate"),
        ([], "trl"),
        (["--trainer", "Trainer", "--method", "lora"], "peft"),
        (["--trainer", "Trainer", "load_in_8bit=true"], "bitsandbytes"),
    ],
)
def test_a_package_that_is_missing_is_named(
    words: list[str],
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(transformers_step, "find_spec", lambda name: name != package or None)
    assert plan_command(given("--hf", str(written(tmp_path, LLAMA_1B)), *words)) == 2
    assert f"{package} is not installed, so that" in capsys.readouterr().err


def test_it_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(given("tiny/full", "--trainer", "SFTTrainer")) == 2
    assert "--trainer: 'SFTTrainer' is for --hf" in capsys.readouterr().err
    assert plan_command(given("--hf", "/no", "--trainer", "SFTTrainer")) == 2
    assert "has no config.json that can be read" in capsys.readouterr().err
