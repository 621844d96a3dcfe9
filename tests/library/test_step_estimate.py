"""Estimates of trainers' steps: near traced peaks, without torch, and none where no formula is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.benchmarks import benchmark
from tests.helpers.hugging_face import LLAMA_1B, written
from tests.helpers.torchvision import without_torchvision
from torchtune_adaptive.library import TransformersRollouts, TransformersStep

COMPARED = benchmark("trainer_estimate")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(written(tmp_path, LLAMA_1B))


def test_nine_of_ten_are_as_near_to_traces_as_is_said() -> None:
    near = [abs(error) <= TransformersStep.ESTIMATE_ERROR for error in COMPARED["errors"]()]
    assert len(near) > 180 and sum(near) >= 0.9 * len(near)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"lora": True, "padded": True},
        {"dtype": "bfloat16", "ranks": 2, "gradient_accumulation_steps": 3},  # DDP
    ],
)
def test_an_estimate_is_near_to_a_trace(settings: dict[str, Any], tmp_path: Path) -> None:
    shape = {**COMPARED["MODELS"]["Llama-3.2-1B"], "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    step = TransformersStep(folder=str(tmp_path), per_device_train_batch_size=8, **settings)
    with without_torchvision():
        traced = step.plan("h200", ceiling=8, cache=False, timeout=300)
    assert step.estimated() == pytest.approx(traced.peak, rel=TransformersStep.ESTIMATE_ERROR)


def test_more_takes_more(folder: str) -> None:
    def estimated(**settings: Any) -> int:
        found = TransformersStep(folder=folder, **settings).estimated()
        assert found is not None
        return found

    usual = estimated()
    assert estimated(per_device_train_batch_size=16) > usual
    assert estimated(max_length=2048) > usual
    assert estimated(gradient_checkpointing=False) > usual
    assert estimated(ranks=8, fsdp=True) < usual / 2
    assert estimated(optim="sgd") < estimated() < estimated(optim="adamw_torch")
    lora = estimated(lora=True)
    assert estimated(lora=True, load_in_4bit=True, dtype="bfloat16") < lora < usual
    assert estimated(lora=True, target_modules=["q_proj"]) < lora < estimated(lora=True, r=64)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_liger_kernel": True},
        {"optim": "adafactor"},
        {"trainer": "DPOTrainer"},
        {"bf16": False, "ranks": 2, "fsdp": True},
        {"lora": True, "load_in_4bit": True},
    ],
)
def test_what_no_formula_is_for_has_no_estimate(folder: str, settings: dict[str, Any]) -> None:
    assert TransformersStep(folder=folder, **settings).estimated() is None


def test_nor_have_other_models_and_rollouts(folder: str, tmp_path: Path) -> None:
    assert TransformersRollouts(folder=folder).estimated() is None
    assert TransformersStep(folder=str(tmp_path / "nothing")).estimated() is None
    path = Path(folder) / "config.json"
    for changes in ({"model_type": "mixtral"}, {"hidden_size": "wide"}, {"vocab_size": None}):
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        assert TransformersStep(folder=folder).estimated() is None, changes
    windows = ({"model_type": "mistral"}, {"model_type": "qwen2", "use_sliding_window": True})
    for changes in windows:
        path.write_text(json.dumps({**LLAMA_1B, **changes, "sliding_window": 1024}))
        assert TransformersStep(folder=folder).estimated() is None, "the default is rows of 1,024"
        assert TransformersStep(folder=folder, max_length=512).estimated() is not None
        flash = TransformersStep(folder=folder, attn_implementation="flash_attention_2")
        assert flash.estimated() is not None
    path.write_text("[]")
    assert TransformersStep(folder=folder).estimated() is None


def test_it_needs_no_torch(folder: str) -> None:
    script = (
        "import sys; from torchtune_adaptive import TransformersStep; "
        f"print(TransformersStep(folder={folder!r}).estimated(), 'torch' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert said.stdout.split()[1:] == ["False"], said.stderr
