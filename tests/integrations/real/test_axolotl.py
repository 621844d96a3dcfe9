"""Axolotl's command with the plugin: the numbers of Axolotl without it, also where memory runs out.

On one process: on several, Axolotl asks for a device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integrations.real.trainers import llama, tokenizer

pytestmark = [pytest.mark.exhaustive, pytest.mark.runs]

ROOT = Path(__file__).parents[3]
CONFIG: dict[str, Any] = {
    "base_model": "./model",
    "datasets": [
        {"path": "./data.jsonl", "ds_type": "json", "type": "completion", "field": "text"}
    ],
    "output_dir": "./out",
    "sequence_len": 64,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "max_steps": 5,
    "learning_rate": 0.01,
    "optimizer": "adamw_torch",
    "lr_scheduler": "constant",
    "bf16": False,
    "tf32": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "attn_implementation": "sdpa",
    "special_tokens": {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"},
}
PACKED = {"sample_packing": True, "multipack_real_batches": True, "flash_attention": False}
NO_KERNELS = {f"lora_{of}_kernel": False for of in ("mlp", "qkv", "o")}  # which are for GPUs
# A plugin of the test: it loses memory, and writes what was logged.
BESIDE = """
import json, os, torch
from axolotl.integrations.base import BasePlugin
from tests.integrations.real.trainers import Loss, lose_memory

class Beside(BasePlugin):
    def pre_lora_load(self, cfg, model):
        torch.manual_seed(0)  # Axolotl draws adapters before it sets a seed

    def post_trainer_create(self, cfg, trainer):
        self.trainer, self.left = trainer, lambda: 0
        if times := int(os.environ["TIMES"]):
            self.left = lose_memory(trainer, Loss(step=2, times=times))

    def post_train(self, cfg, model):
        assert not self.left()
        history = self.trainer.state.log_history[:-1]
        sums = [float(p.detach().double().abs().sum()) for p in model.parameters()]
        with open("seen.json", "w") as file:
            json.dump({"history": history, "weights": sums, "class": type(self.trainer).__name__}, file)
"""
ADAPTIVE = "torchtune_adaptive.integrations.axolotl.AdaptivePlugin"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama(max_position_embeddings=256).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows = [
        {"text": " ".join(f"w{row * word % 61}" for word in range(3, 4 + row % 27))}
        for row in range(128)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "beside.py").write_text(BESIDE)
    return tmp_path


def train(
    folder: Path, ours: dict[str, Any] | None, times: int = 0, **settings: Any
) -> tuple[dict[str, Any], str]:
    """What was logged, and the output."""
    plugins = ["beside.Beside"]
    config = CONFIG | settings
    if ours is not None:
        plugins.insert(0, ADAPTIVE)
        config["adaptive"] = ours
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"plugins": plugins}))
    own = {"PYTHONPATH": f"{ROOT}:{folder}", "PYTHONWARNINGS": "ignore", "TIMES": str(times)}
    quiet = {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    on_cpu = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "axolotl.cli.train", "config.yaml"],
        cwd=folder,
        env={**os.environ, **own, **quiet, **on_cpu},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads((folder / "seen.json").read_text()), done.stdout


def logged(seen: dict[str, Any], *names: str) -> list[float]:
    return [row[name] for row in seen["history"] for name in names]


@pytest.mark.parametrize(
    ("ours", "settings"),
    [
        ({"memory_limit": "20MiB"}, {}),
        (
            {"search": False},
            {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
            | NO_KERNELS,
        ),
        ({"search": False}, PACKED),
    ],
    ids=["searched", "lora", "packed"],
)
def test_the_numbers_of_axolotl(
    folder: Path, ours: dict[str, Any], settings: dict[str, Any]
) -> None:
    plain, _ = train(folder, None, **settings)
    same, said = train(folder, ours, **settings)
    lost, retried = train(folder, ours, times=2, **settings)
    assert plain["class"] == "AxolotlTrainer" and same["class"] == "AdaptiveAxolotlTrainer"
    assert "AxolotlTrainer of Axolotl is made adaptive" in said and "16 rows a step" in said
    names = "loss", "grad_norm", "learning_rate", "tokens/trainable", "tokens/total"
    assert logged(same, *names) == logged(plain, *names)
    assert same["weights"] == plain["weights"]
    assert logged(lost, "tokens/trainable") == logged(plain, "tokens/trainable")
    assert logged(lost, *names[:2]) == pytest.approx(logged(plain, *names[:2]), rel=1e-5)
    assert "out of memory in forward" in retried
    assert max(logged(lost, "adaptive/retried_steps")) == 2


def test_a_mistake_in_the_options_is_told_before_a_model_is_loaded(folder: Path) -> None:
    for ours, settings, message in (
        (
            {"memory": "20MiB"},
            {},
            "adaptive: {'memory': '20MiB'} is no mapping of some of memory_limit",
        ),
        ({}, PACKED, "sample_packing: Axolotl fills bins with rows"),
    ):
        with pytest.raises(AssertionError, match="UsageError") as error:
            train(folder, ours, **settings)
        assert message in str(error.value)
