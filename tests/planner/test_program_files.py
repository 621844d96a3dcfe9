"""Plans of files of other trainers, by these trainers themselves, in environments that have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.program_commands import MODEL, plan, run

pytestmark = [pytest.mark.exhaustive, pytest.mark.runs]

LENGTH = 128
OF_TRL = {
    "model_name_or_path": "./model",
    "dataset_name": "nobody/has-it",
    "per_device_train_batch_size": 4,
    "max_length": LENGTH,
    "report_to": "none",
    "output_dir": "out",
}
OF_AXOLOTL = {
    "base_model": "./model",
    "datasets": [{"path": "nobody/has-it", "type": "alpaca"}],
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "sequence_len": LENGTH,
    "num_epochs": 1,
    "optimizer": "adamw_torch",
    "learning_rate": 1e-4,
    "bf16": True,
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_target_linear": True,
    "val_set_size": 0.05,
    "output_dir": "./out",
    "special_tokens": {"pad_token": "<pad>"},
}
OF_LLAMA_FACTORY = {
    "model_name_or_path": "./model",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_target": "all",
    "dataset": "nobody_has_it",
    "template": "llama3",
    "cutoff_len": LENGTH,
    "per_device_train_batch_size": 4,
    "output_dir": "out",
    "report_to": "none",
    "bf16": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model of which there is only the config."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def planned(python: Path, folder: Path, keys: dict[str, Any], *words: str) -> dict[str, Any]:
    (folder / "file.yaml").write_text(yaml.safe_dump(keys))
    found = plan(python, folder, "file.yaml", *words)
    assert any(line.startswith("rows: made up") for line in found["assumptions"])
    assert any(line.startswith("tokenizer: none is at") for line in found["assumptions"])
    assert found["peak"]["parts"]["optimizer state"]
    return found


@pytest.mark.parametrize(
    ("trainer", "tokens"),
    [("SFT", LENGTH), ("DPO", 2 * LENGTH), ("KTO", LENGTH), ("Reward", 2 * LENGTH)],
)
def test_files_of_trl(trainer: str, tokens: int, folder: Path, beside_trl: Path) -> None:
    found = planned(beside_trl, folder, OF_TRL, "--trainer", f"{trainer}Trainer")
    assert (found["rows"], found["tokens_in_a_row"]) == (4, tokens)
    assert any(f"`trl {trainer.lower()}`" in line for line in found["assumptions"])


def test_keys_say_which_script_of_trl_a_file_is_for(folder: Path, beside_trl: Path) -> None:
    launch = {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "bf16"}
    (folder / "ddp.yaml").write_text(yaml.safe_dump(launch))
    words = ("--accelerate", "ddp.yaml", "--max-length", "64")
    found = planned(beside_trl, folder, {**OF_TRL, "beta": 0.2}, *words)
    assert (found["tokens_in_a_row"], found["ranks"]) == (128, 2)
    assert any("`trl dpo`" in line for line in found["assumptions"])
    (folder / "file.yaml").write_text(yaml.safe_dump({**OF_TRL, "gizmo": 1}))
    done = run(beside_trl, folder, "-m", "torchtune_adaptive", "plan", "file.yaml")
    assert done.returncode and "gizmo: no keys of `trl sft`" in done.stdout + done.stderr


@pytest.mark.parametrize("script", ["grpo", "rloo"])
def test_files_of_trl_that_generate(script: str, folder: Path, beside_trl: Path) -> None:
    of_texts = {"reward_funcs": ["think_format_reward"], "max_completion_length": 64}
    keys = {name: value for name, value in OF_TRL.items() if name != "max_length"}
    more = {"num_generations": 4, "max_steps": 8}
    trainer = f"{script.upper()}Trainer"
    words = ("--trainer", trainer, "--memory", "500MiB")
    found = planned(beside_trl, folder, {**keys, **of_texts, **more}, *words)
    assert (found["rows"], found["generated_tokens"]) == (4, 64)


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, LENGTH),
        ({"rl": "dpo", "chat_template": "llama3"}, 2 * LENGTH),
        ({"adapter": None, "gradient_checkpointing": True}, LENGTH),
        ({"sample_packing": True, "attn_implementation": "flash_attention_2"}, LENGTH),
    ],
    ids=["lora", "dpo", "full", "packed"],
)
def test_files_of_axolotl(
    changes: dict[str, Any], tokens: int, folder: Path, beside_axolotl: Path
) -> None:
    found = planned(beside_axolotl, folder, {**OF_AXOLOTL, **changes, "wandb_project": "mine"})
    assert (found["rows"], found["tokens_in_a_row"], found["micro_batches"]) == (4, tokens, 2)


def test_files_of_axolotl_with_images(tmp_path: Path, beside_axolotl: Path) -> None:
    make = (
        "from tests.helpers.example_files import Path, stand_in; stand_in('gemma3', Path('model'))"
    )
    done = run(beside_axolotl, tmp_path, "-c", make)
    assert (tmp_path / "model" / "processor_config.json").exists(), done.stderr[-3000:]
    of_images = {
        "processor_type": "AutoProcessor",
        "chat_template": "gemma3",
        "skip_prepare_dataset": True,
        "remove_unused_columns": False,
        "sequence_len": 512,
    }
    keys = {**OF_AXOLOTL, **of_images, "val_set_size": 0}
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(keys))
    found = plan(beside_axolotl, tmp_path, "file.yaml")
    assert (found["rows"], found["tokens_in_a_row"]) == (4, 512)
    assert any("an image of 1024 x 1024 pixels" in line for line in found["assumptions"])
    for path in (tmp_path / "model").iterdir():
        if path.name != "config.json":
            path.unlink()
    done = run(beside_axolotl, tmp_path, "-m", "torchtune_adaptive", "plan", "file.yaml")
    assert done.returncode and "makes no numbers of images" in done.stdout + done.stderr


def test_what_axolotl_does_not_take_is_said_by_it(folder: Path, beside_axolotl: Path) -> None:
    (folder / "file.yaml").write_text(yaml.safe_dump({**OF_AXOLOTL, "adapter": "qlora"}))
    done = run(beside_axolotl, folder, "-m", "torchtune_adaptive", "plan", "file.yaml")
    assert done.returncode and "ValidationError" in done.stdout + done.stderr


@pytest.mark.parametrize(("stage", "tokens"), [("sft", 1), ("dpo", 2), ("kto", 1), ("pt", 1)])
def test_files_of_llama_factory(
    stage: str, tokens: int, folder: Path, beside_llama_factory: Path
) -> None:
    found = planned(beside_llama_factory, folder, {**OF_LLAMA_FACTORY, "stage": stage})
    assert (found["rows"], found["tokens_in_a_row"]) == (4, tokens * LENGTH)
