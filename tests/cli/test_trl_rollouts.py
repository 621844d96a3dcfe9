"""``plan FILE`` of ``trl grpo`` and ``trl rloo``: what keys become, and the answer; nothing is traced."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hugging_face import LLAMA_1B, written
from torchtune_adaptive.cli.other_trainers.files import read_file
from torchtune_adaptive.cli.plan_options import add_arguments, parsed, plan_command
from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.library import RolloutsPlan, TransformersRollouts, transformers_step
from torchtune_adaptive.library.rollouts_plan import PlannedPhase
from torchtune_adaptive.library.vllm_engine import EngineNeeds

GIB = 1 << 30
FOLDER = Path(__file__).parents[2] / "tests" / "data" / "trainer_files"


def phase(name: str, peak: int, beside: int, largest: int, rows: int = 4) -> PlannedPhase:
    usable = 22 * GIB - beside
    return PlannedPhase(name, rows, peak, beside, usable, largest, {"parameters": peak})


ASLEEP = RolloutsPlan(
    12,
    4,
    13 * GIB,
    {"parameters": GIB},
    16 * GIB,
    (),
    phases=(
        phase("generation", 13 * GIB, 6 * GIB, 1 << 14, rows=0),
        phase("scoring", 10 * GIB, GIB, 40),
        phase("training", 15 * GIB, GIB, 12),
    ),
    limiting="generation",
    most_utilization=0.38,
    engine=EngineNeeds(2 * GIB, GIB, 2048),
)
FULL = RolloutsPlan(
    6,
    8,
    20 * GIB,
    {"parameters": GIB},
    22 * GIB,
    (),
    phases=(phase("generation", 9 * GIB, 0, 70), phase("training", 23 * GIB, 0, 6)),
    limiting="training",
)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[RolloutsPlan | TransformersRollouts]:
    """The next plan, and then the step that it was asked for."""
    found: list[Any] = []

    def plan(step: TransformersRollouts, **device: Any) -> RolloutsPlan:
        answer: RolloutsPlan = found.pop()
        found.append(step)
        return answer

    monkeypatch.setattr(TransformersRollouts, "plan", plan)
    monkeypatch.setattr(TransformersRollouts, "remembered", lambda step, **_: None)
    monkeypatch.setattr(transformers_step, "version", lambda name: "5.23.0")
    return found


def planned(path: Path, folder: Path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    line = [str(path), "--gpu", "4090", "--hf", str(written(folder, LLAMA_1B)), *words]
    return plan_command(parsed(parser, line))


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            "trl_grpo/full",
            {"trainer": "GRPOTrainer", "num_generations": 8, "beta": 0.04, "use_vllm": False}
            | {"max_prompt_length": 512, "max_completion_length": 1024, "padded": True}
            | {"gradient_accumulation_steps": 4, "gradient_checkpointing": True, "lora": False},
        ),
        (
            "trl_grpo/vllm_lora",
            {"lora": True, "r": 32, "use_vllm": True, "vllm_mode": "colocate", "padded": False}
            | {"vllm_gpu_memory_utilization": 0.25, "vllm_enable_sleep_mode": True}
            | {"max_prompt_length": 320, "max_completion_length": 1024, "steps_per_generation": 8}
            | {"vllm_max_model_length": 2048, "num_iterations": 2, "temperature": 0.9},
        ),
        (
            "trl_grpo/server_fsdp",
            {"vllm_mode": "server", "fsdp": True, "generation_batch_size": 64, "beta": 0.0},
        ),
        ("trl_rloo/full", {"trainer": "RLOOTrainer", "beta": 0.05, "top_p": 0.95}),
        ("trl_rloo/vllm", {"beta": 0.0, "num_generations": 2, "use_vllm": True}),
    ],
)
def test_what_a_file_becomes(path: str, expected: dict[str, Any]) -> None:
    file = read_file(FOLDER / f"{path}.yaml")
    assert file is not None
    assert {key: file.settings[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("reward_model_name_or_path=a/reward", "keeps a reward model in memory, whose size is not"),
        ("use_transformers_continuous_batching=true", "a cache of a share of the memory"),
        ("cast_lm_head_to_fp32=true", "has a head of its own in float32"),
        ("cache_implementation=static", "cache_implementation: static is another kind of cache"),
        ("generation_kwargs={num_beams: 4}", "may generate in another way"),
        ("vllm_mode=cluster", "vllm_mode: cluster is another way of TRL's"),
        ("max_completion_length=null", "lets completions get as long as the model can"),
        ("use_liger_kernel=true", "replaces layers by kernels"),
    ],
)
def test_what_memory_depends_on_and_is_not_planned_is_refused(change: str, complaint: str) -> None:
    with pytest.raises(NoPrediction) as raised:
        read_file(FOLDER / "trl_grpo" / "full.yaml", [change])
    assert complaint in str(raised.value)


def test_a_generation_that_cannot_be_divided_is_refused(
    tmp_path: Path, answers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = FOLDER / "trl_grpo" / "full.yaml"
    assert planned(path, tmp_path, "num_generations=5") == 2
    assert "num_generations: 5 does not divide the 32 completions" in capsys.readouterr().err
    assert planned(path, tmp_path, "generation_batch_size=12") == 2
    assert "12 is no multiple of 8, the rows of a micro-batch" in capsys.readouterr().err


def test_each_phase_is_told_with_what_vllm_may_take(
    tmp_path: Path, answers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.append(ASLEEP)
    path = FOLDER / "trl_grpo" / "vllm_lora.yaml"
    assert planned(path, tmp_path, "--seq-len", "700", "gradient_accumulation_steps=8") == 0
    [step] = answers
    assert step.max_prompt_length == 704 and step.max_length == 704 + 1024
    text = said(capsys)
    for line in (
        "per_device_train_batch_size 4: FITS. Generation has the least room: 13 GiB (+-3%) of 16 GiB, beside "
        "6 GiB of vLLM. Largest that fits: 12.",
        "vllm_lora.yaml as TRL (trl grpo) trains example/small-llama on 1 rtx4090-24gb, prompts of 704 and "
        "completions of 1024 tokens",
        "vllm_gpu_memory_utilization may be up to 0.38 with 4 rows.",
        "Of vLLM's 6 GiB, its weights take 2 GiB. Its cache has room for at most 4 of the 32 sequences",
        "Write in vllm_lora.yaml: per_device_train_batch_size: 8, gradient_accumulation_steps: 4, "
        "steps_per_generation: 4 (a step keeps its 32 rows on each GPU, and a generation its 32)",
        "generation 13 GiB 6 GiB 19 GiB FITS",
        "training 4 15 GiB 1 GiB 16 GiB FITS 12",
        "by vLLM, which takes 0.25 of the whole card by its own setting (arithmetic, not measured) while it "
        "generates; asleep it is taken to keep 1 GiB",
        "reference: none, as beta is 0",
        "max_prompt_length says how many tokens",
    ):
        assert line in text, line


def test_without_vllm_nothing_is_said_of_it(
    tmp_path: Path, answers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.append(FULL)
    assert planned(FOLDER / "trl_grpo" / "full.yaml", tmp_path) == 1
    text = said(capsys)
    assert "8: DOES NOT FIT. Training has the least room: 23 GiB (+-3%) of 22 GiB. Largest" in text
    assert "vllm" not in text and "WARNING" not in text
    assert (
        "Write in full.yaml: per_device_train_batch_size: 4, gradient_accumulation_steps: 8" in text
    )
    assert "reference: a second model, in memory" in text
    assert "generation: by the model itself, with a cache" in text


@pytest.mark.parametrize(
    ("changes", "expected", "status"),
    [
        ({"most_utilization": 0.2}, "vllm_gpu_memory_utilization: 0.2 would leave room for 4", 0),
        ({"most_utilization": 0.0}, "No vllm_gpu_memory_utilization leaves room for 4 rows", 0),
        (
            {"engine": EngineNeeds(7 * GIB, None, 0)},
            "vLLM does not start with 6 GiB: its weights take 7 GiB, which leaves it 1 GiB short",
            1,
        ),
        (
            {"engine": EngineNeeds(2 * GIB, 16 * GIB, 131072)},
            "its cache for a sequence of 131072 tokens 16 GiB. Set a higher vllm_gpu_memory_utilization, or "
            "vllm_max_model_length to 1344 or more",
            0,
        ),
        ({"engine": EngineNeeds(2 * GIB, GIB, 2 << 20)}, "has room for all 32 sequences", 0),
        (
            {"largest": 0},
            "What takes less, in vllm_lora.yaml: a shorter max_completion_length; or more GPUs",
            0,
        ),
    ],
)
def test_what_vllm_may_take_and_needs(
    changes: dict[str, Any],
    expected: str,
    status: int,
    tmp_path: Path,
    answers: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers.append(replace(ASLEEP, **changes))
    assert planned(FOLDER / "trl_grpo" / "vllm_lora.yaml", tmp_path) == status
    assert expected in said(capsys)


def test_what_takes_less(tmp_path: Path, answers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    answers.append(replace(FULL, largest=0))
    path = FOLDER / "trl_grpo" / "full.yaml"
    planned(path, tmp_path, "use_vllm=true", "gradient_checkpointing=false")
    assert (
        "What takes less, in full.yaml: use_peft: true, gradient_checkpointing: true, beta: 0, which needs "
        "no reference, vllm_enable_sleep_mode: true, a shorter max_completion_length"
    ) in said(capsys)


def test_json_and_markdown_have_the_phases(
    tmp_path: Path, answers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = FOLDER / "trl_grpo" / "vllm_lora.yaml"
    answers.append(ASLEEP)
    assert planned(path, tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "FITS" and found["limiting"] == "generation"
    assert found["file"]["trainer"] == "TRL (trl grpo)"
    assert [one["beside"] for one in found["phases"]] == [6 * GIB, GIB, GIB]
    assert found["most_utilization"] == 0.38 and found["engine"]["tokens"] == 2048
    assert found["step"]["vllm_enable_sleep_mode"] and found["step"]["max_length"] == 320 + 1024
    answers[:] = [ASLEEP]
    assert planned(path, tmp_path, "--markdown") == 0
    assert "| training | 4 | 15 GiB | 1 GiB | 16 GiB | FITS | 12 |" in capsys.readouterr().out


def test_a_model_by_its_name_has_the_trainers_defaults(
    tmp_path: Path, answers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    folder = str(written(tmp_path, LLAMA_1B))
    answers.append(replace(FULL, largest=16))
    line = [
        "--hf",
        folder,
        "--trainer",
        "RLOOTrainer",
        "--seq-len",
        "99",
        "max_completion_length=77",
    ]
    plan_command(parsed(parser, [*line, "--method", "lora"]))
    [step] = answers
    assert (step.trainer, step.num_generations, step.beta, step.lora) == (
        "RLOOTrainer",
        2,
        0.05,
        True,
    )
    assert step.max_length == 99 + 77
    text = said(capsys)
    assert "RLOOTrainer on 1 h100-80gb" in text and "Nothing has to change." in text
    assert plan_command(parsed(parser, [*line, "max_length=5"])) == 2
    assert "'max_length=5' is not a setting of this step" in capsys.readouterr().err
