"""Plans of commands and trainers of other packages, in an environment that has them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.helpers.beside import ROOT
from tests.helpers.hub import hub
from tests.helpers.program_commands import MODEL, plan, run
from torchtune_adaptive.planner import gpus

pytestmark = [pytest.mark.exhaustive, pytest.mark.runs]

HELPERS = ROOT / "tests" / "helpers"
PLANNED = ("SFT", "DPO", "KTO", "Reward", "CPO", "ORPO", "GKD lmbda=0.0")
GENERATING = dict.fromkeys(("GRPO max_completion_length=80", "RLOO max_completion_length=80"), 80)
"""Trainers that generate, and the tokens of a text."""


@pytest.fixture
def folder(tmp_path: Path, beside_trl: Path) -> Path:
    """A folder with a model without weights, a tokenizer and the programs."""
    for name in ("program_trl.py",):
        shutil.copy(HELPERS / name, tmp_path)
    made = "import program_trl; program_trl.tokenizer().save_pretrained('model')"
    run(beside_trl, tmp_path, "-c", made)
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def test_the_command_of_trl(folder: Path, beside_trl: Path) -> None:
    """By its name, as a module, and as the script that it launches."""
    rows = [{"text": " ".join(["word"] * 100)} for _ in range(32)]
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model_name_or_path": "./model",
        "dataset_name": "./data",
        "per_device_train_batch_size": 4,
        "report_to": "none",
        "output_dir": "out",
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(settings))
    before = {*folder.rglob("*")}
    ways = [
        ("trl", "sft", "--config", "sft.yaml"),
        ("-m", "trl", "sft", "--config", "sft.yaml"),
        ("-m", "trl.scripts.sft", "--config", "sft.yaml"),
    ]
    named, as_module, of_script = (plan(beside_trl, folder, *words) for words in ways)
    assert named["rows"] == 4 and named["tokens_in_a_row"] == 101
    assert named["peak"] == as_module["peak"] == of_script["peak"]
    assert {*folder.rglob("*")} == before


@pytest.mark.parametrize("words", PLANNED)
def test_trainers(words: str, folder: Path, beside_trl: Path) -> None:
    found = plan(beside_trl, folder, "program_trl.py", "model", *words.split())
    assert found["rows"] == 2 and found["peak"]["parts"]["optimizer state"]


@pytest.mark.parametrize(("name", "tokens"), GENERATING.items())
def test_trainers_that_generate(name: str, tokens: int, folder: Path, beside_trl: Path) -> None:
    words = ("program_trl.py", "model", *name.split(), "--memory", "400MiB")
    found = plan(beside_trl, folder, *words)
    assert found["generated_tokens"] == tokens
    assert found["peak"]["by_phase"]["generation"] and found["peak"]["by_phase"]["backward"]


def test_vllm_stands_beside_a_trainer(folder: Path, beside_trl: Path) -> None:
    share = int(gpus.gpu(gpus.DEFAULT).total * 0.02)
    words = ("use_vllm=True", "max_completion_length=80", "vllm_gpu_memory_utilization=0.02")
    memory = ("--memory", f"{(share >> 20) + 800}MiB")
    peak = plan(beside_trl, folder, "program_trl.py", "model", "GRPO", *words, *memory)["peak"]
    assert peak["parts"]["vLLM"] == share


FROM_HUB = """
import torch
from huggingface_hub import hf_hub_download
from transformers import AutoModelForCausalLM

hf_hub_download("org/model", "model.safetensors")
model = AutoModelForCausalLM.from_pretrained("org/model", device_map="auto").half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(4):
    tokens = torch.randint(0, 100, (2, 16), device="cuda")
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_weights_are_not_downloaded(folder: Path, beside_trl: Path) -> None:
    (folder / "train.py").write_text(FROM_HUB)
    with hub(model=MODEL) as server:
        found = plan(beside_trl, folder, "train.py", HF_ENDPOINT=server.address, HF_HUB_OFFLINE="0")
    assert found["peak"]["parts"]["parameters"]
    assert [one for one in server.asked if one.startswith("GET")] == [
        "GET /org/model/resolve/main/config.json"
    ]
