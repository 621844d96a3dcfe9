"""``plan FILE`` of other trainers: whose file it is, and the command that trains it; nothing is run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.hugging_face import LLAMA_1B, written
from tests.helpers.planning import asked
from tests.helpers.trainer_files import FOLDER, changed, given
from torchtune_adaptive.cli import plan_options
from torchtune_adaptive.cli.asked_program import AskedProgram
from torchtune_adaptive.cli.other_trainers import files
from torchtune_adaptive.cli.other_trainers.files import TrainerFile, read_file, recognized
from torchtune_adaptive.cli.plan_options import plan_command
from torchtune_adaptive.common import ConfigError

OF = {"axolotl": "Axolotl", "llama_factory": "LLaMA-Factory", "trl_sft": "TRL", "trl_dpo": "TRL"}
OF |= {"trl_grpo": "TRL", "trl_rloo": "TRL"}
DDP = FOLDER / "accelerate" / "ddp.yaml"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: name)


def file_of(path: str, *changes: str, **others: Any) -> TrainerFile:
    found = read_file(FOLDER / f"{path}.yaml", changes, **others)
    assert found is not None
    return found


def test_whose_file_it_is(tmp_path: Path) -> None:
    for folder, name in OF.items():
        for path in (FOLDER / folder).glob("*.yaml"):
            assert recognized(given(path), path) == name
    torchtunes = {"model": {"_component_": "torchtune.models.llama3.llama3_8b"}, "base_model": "x"}
    assert recognized(torchtunes, tmp_path) is None
    assert recognized({"lists": [{"_component_": "a"}], "base_model": "x"}, tmp_path) is None
    assert recognized({"something": 1}, tmp_path) is None


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        (
            {"model_name_or_path": "x", "cutoff_len": 8, "use_peft": True},
            "has keys of several trainers",
        ),
        (
            {"model_name_or_path": "x", "bf16": True},
            "may be of several trainers, or of none. Looked for",
        ),
        ({"base_model": "x"}, "Looked for, Axolotl: base_model and one of"),
        ({"base_model": 3, "adapter": "lora"}, "base_model: 3 is not the name of a model"),
        ({"distributed_type": "FSDP"}, "Plan the trainer's file, with --accelerate"),
        ({"model": "x", "peft_config": {}}, "LLaMA-Factory's version 1, which is not planned"),
    ],
)
def test_files_that_are_refused(keys: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(keys))
    with pytest.raises(ConfigError) as raised:
        read_file(path)
    assert complaint in str(raised.value)


@pytest.mark.usefixtures("installed")
def test_the_command_is_the_trainers_own(tmp_path: Path) -> None:
    axolotl, factory = (
        str(FOLDER / "axolotl/lora.yaml"),
        str(FOLDER / "llama_factory/lora_sft.yaml"),
    )
    trl = str(FOLDER / "trl_sft/full.yaml")
    ours = "torchtune_adaptive.cli.other_trainers.trl"
    assert file_of("axolotl/lora").words(tmp_path) == ("-m", "axolotl.cli.train", axolotl)
    words = ("-m", "llamafactory.cli", "train", factory)
    assert file_of("llama_factory/lora_sft").words(tmp_path) == words
    assert file_of("trl_sft/full").words(tmp_path) == ("-m", ours, trl, "")
    launched = file_of("trl_sft/full", launch=DDP, asked="DPOTrainer").words(tmp_path)
    assert launched == ("-m", ours, trl, "DPOTrainer", "--accelerate_config", str(DDP))
    launched = file_of("axolotl/lora", launch=DDP).words(tmp_path)
    assert launched[:4] == ("accelerate", "launch", "--config_file", str(DDP))
    assert launched[4:] == ("-m", "axolotl.cli.train", axolotl)


@pytest.mark.usefixtures("installed")
def test_what_is_changed_is_in_a_copy(tmp_path: Path) -> None:
    changes = ("fsdp_config.version=2", "lora_target_modules=[q_proj]", "deepspeed=null")
    file = file_of("axolotl/lora", *changes, length=99, model="a/model")
    *_, path = file.words(tmp_path)
    assert Path(path) == tmp_path / "lora.yaml"
    found = given(Path(path))
    assert found["fsdp_config"] == {"version": 2} and found["lora_target_modules"] == ["q_proj"]
    assert found["sequence_len"] == 99 and found["base_model"] == file.model == "a/model"
    assert found["deepspeed"] is None
    as_it_was = given(FOLDER / "axolotl" / "lora.yaml")
    assert {key for key in as_it_was if found[key] != as_it_was[key]} <= {
        *("sequence_len", "base_model", "lora_target_modules", "deepspeed")
    }


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["adapter=["], "adapter: '[' is not YAML"),
        (["--trainer", "DPOTrainer"], "'DPOTrainer' is not of a file of Axolotl"),
        (["--method", "lora"], "The file says the method"),
        (["--accelerate", str(FOLDER / "axolotl/full.yaml")], "is not an accelerate configuration"),
        (
            [],
            "is of Axolotl, which is not installed, and its own program is run. pip install axolotl",
        ),
    ],
)
def test_what_cannot_be_answered(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = changed(tmp_path, "axolotl/lora", base_model=str(written(tmp_path, LLAMA_1B)))
    assert plan_command(asked([str(file), *words])) == 2
    assert complaint in capsys.readouterr().err


def test_a_launch_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(asked(["tiny/full", "--accelerate", str(DDP)])) == 2
    assert "goes with a file of another trainer" in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
def test_a_file_is_a_program_whose_rows_are_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def noted(_: argparse.Namespace, asked: AskedProgram, *others: Any) -> str:
        told.append(asked)
        return "FITS"

    monkeypatch.setattr(plan_options, "plan_of_program", noted)
    file = changed(tmp_path, "trl_sft/full")
    model = str(written(tmp_path, LLAMA_1B))
    assert plan_command(asked([str(file), "--hf", model, "--gpu", "2x4090"])) == 0
    [one] = told
    program, words = one.program, one.program.words
    assert (program.ranks, program.gpu.name) == (2, "rtx4090-24gb")
    assert program.made_up and program.title == f"{file.name} (TRL)"
    assert one.command == (str(file),)
    assert words[:2] == ("-m", "torchtune_adaptive.cli.other_trainers.trl")
