"""``plan --trainer``: settings in the trainers' words, and the answer; nothing is traced."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hugging_face import LLAMA_1B, written
from torchtune_adaptive.cli.plan_options import add_arguments, parsed, plan_command
from torchtune_adaptive.library import Plan, Speed, TransformersStep, transformers_step
from torchtune_adaptive.library.planning import ExpertsPlan, RoutedPlan
from torchtune_adaptive.planner import Machine

GIB = 1 << 30


def asked(folder: Path, *words: str) -> argparse.Namespace:
    line = ["--hf", str(folder), "--trainer", "SFTTrainer", *words]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parsed(parser, line)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TransformersStep, dict[str, Any]]]:
    """The steps that are planned, with their devices; all take 10 GiB, and 24 rows fit."""
    found: list[tuple[TransformersStep, dict[str, Any]]] = []

    def plan(step: TransformersStep, **device: Any) -> Plan:
        found.append((step, device))
        rows = step.per_device_train_batch_size
        return Plan(24, rows, 10 * GIB, {"parameters": 8 * GIB, "inputs": 9}, 70 * GIB, ())

    monkeypatch.setattr(TransformersStep, "plan", plan)
    monkeypatch.setattr(TransformersStep, "remembered", lambda step, **_: None)
    monkeypatch.setattr(transformers_step, "version", lambda name: "5.23.0")
    return found


def test_settings_are_the_trainers_own(
    tmp_path: Path, steps: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path, LLAMA_1B)
    words = ("--trainer", "DPOTrainer", "dtype=bfloat16", "target_modules=q_proj,v_proj", "r=16")
    words += ("per_device_train_batch_size=4", "gradient_checkpointing=false", "optim=sgd")
    options = ("--method", "lora", "--gpu", "2xa100-80gb", "--seq-len", "512")
    assert plan_command(asked(folder, *options, *words)) == 0
    [(step, device)] = steps
    assert (step.trainer, step.dtype, step.r, step.optim) == ("DPOTrainer", "bfloat16", 16, "sgd")
    assert step.lora and step.target_modules == ["q_proj", "v_proj"] and step.ranks == 2
    assert step.max_length == 512 and not step.gradient_checkpointing
    assert device["gpu"] == "a100-80gb" and device["memory"] is None
    said = capsys.readouterr().out
    assert "per_device_train_batch_size 4: FITS, peak 10 GiB (-3% to +7%) of" in said
    assert "Largest that fits: 24." in said
    assert "DPOTrainer on 2 x a100-80gb, pairs of rows of 512 tokens" in said
    assert "step: that of DPOTrainer as of TRL 1.16" in said
    assert "adapters: rank 16, in float32 as PEFT 0.21 has them, on q_proj, v_proj" in said


def test_an_estimate_is_shown_while_the_step_is_traced(
    tmp_path: Path, steps: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path, LLAMA_1B)
    plan_command(asked(folder, "--gpu", "a100-80gb"))
    (shown,) = (line for line in capsys.readouterr().err.splitlines() if "Estimate" in line)
    assert shown.startswith("Estimate by arithmetic (+-10%): about ")
    assert shown.endswith(" per GPU at per_device_train_batch_size 8; tracing follows")
    plan_command(asked(folder, "use_liger_kernel=true"))
    assert "Estimate" not in capsys.readouterr().err
    found = TransformersStep(folder=str(folder)).plan()
    monkeypatch.setattr(TransformersStep, "remembered", lambda step, **_: found)
    plan_command(asked(folder))
    assert "Estimate" not in capsys.readouterr().err


def test_speed_hours_and_other_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = {}

    def remembered(step: TransformersStep, gpu: str, machine: Machine, **_: Any) -> Plan:
        machines[gpu] = machine
        known = {"a100-80gb": 1000.0, "h100-80gb": 2500.0}  # by default an H100
        parts = {"gemm": 0.75, "memory": 0.25}
        speed = Speed(2.0, known[gpu], 0.4, parts, 0.2, (-0.3, 0.05)) if gpu in known else None
        lines = ("power: 300 W",) if speed else ()
        return Plan(24, 8, 20 * GIB, {}, 70 * GIB, lines, speed)

    monkeypatch.setattr(TransformersStep, "remembered", remembered)
    folder = written(tmp_path, LLAMA_1B)
    words = ["--gpu", "a100-80gb", "--power", "300W", "--tokens", "36M", "--price", "1,2,0.5"]
    words += ["--compare", "a100-80gb,h100-80gb,t4"]
    assert plan_command(asked(folder, *words)) == 0
    told, other = machines["a100-80gb"], machines["h100-80gb"]
    assert (told.power, other.power) == (300, None), "another GPU has the power of its own"
    said = capsys.readouterr().out
    assert (
        "Speed at per_device_train_batch_size 8: 1,000 tokens/s per GPU (-30% to +5%), MFU" in said
    )
    assert "36M tokens take 10 hours, and cost 10.00 (at 1.00 for a GPU hour)" in said
    assert "matrix products          75.0%   1.5 s" in said and "power: 300 W" in said
    rows = [line.split() for line in said.splitlines()]
    of_gpu = {row[0]: row for row in rows[-5:] if row}
    assert of_gpu["h100-80gb"][-3:] == ["40%", "4", "8"] and of_gpu["t4-16gb"][1] == "DOES"
    assert plan_command(asked(folder, *words, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["hours"], found["cost"], found["speed"]["mfu"]) == (10, 10, 0.4)
    assert [one["speed"] is None for one in found["compared"]] == [False, False, True]
    plan_command(asked(folder, "--memory", "24GiB"))
    assert "tokens/s" not in capsys.readouterr().out, "memory tells of no speed"


def test_trainers_have_their_own_defaults(tmp_path: Path, steps: Any) -> None:
    folder = written(tmp_path, LLAMA_1B)
    plain = ("--trainer", "Trainer")
    for words in ((), plain, (*plain, "bf16=true"), (*plain, "--method", "qlora")):
        plan_command(asked(folder, *words))
    sft, full, half, qlora = (step for step, _ in steps)
    assert qlora.lora and qlora.load_in_4bit and qlora.gradient_checkpointing and not qlora.bf16
    assert not sft.load_in_4bit
    assert sft.trainer == "SFTTrainer" and sft.bf16 is None and sft.gradient_checkpointing
    assert not full.bf16 and not full.gradient_checkpointing
    assert half.bf16


def test_json_and_status(tmp_path: Path, steps: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path, LLAMA_1B)
    assert plan_command(asked(folder, "--json", "--memory", "8GiB")) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"] == "DOES NOT FIT" and printed["largest"] == 24
    assert printed["step"]["trainer"] == "SFTTrainer"
    assert any("rows: without padding" in line for line in printed["assumptions"])


def test_memory_by_routing_is_said_apart_where_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, even, worst = written(tmp_path, LLAMA_1B), RoutedPlan(8 * GIB, 9), RoutedPlan(GIB, 12)
    experts = ExpertsPlan(even, even)

    def plan(*_: Any, **__: Any) -> Plan:
        return Plan(9, 8, 8 * GIB, {}, 70 * GIB, (), experts=experts)

    monkeypatch.setattr(TransformersStep, "plan", plan)
    monkeypatch.setattr(TransformersStep, "remembered", lambda step, **_: None)
    monkeypatch.setattr(transformers_step, "version", lambda name: "5.23.0")
    plan_command(asked(folder))
    said = capsys.readouterr().out
    assert "experts: wherever routers send tokens, memory is the same" in said
    assert "Experts:" not in said
    experts = ExpertsPlan(even, worst)
    plan_command(asked(folder))
    said = " ".join(capsys.readouterr().out.split())
    assert "Experts: 8 GiB where all get as many tokens, 1 GiB where all tokens go to the" in said
    assert "largest that fits: 9 and 12." in said and "memory is the same" not in said
    plan_command(asked(folder, "--json"))
    found = json.loads(capsys.readouterr().out)["experts"]
    assert found["even"] == {"peak": 8 * GIB, "largest": 9}
    assert found["worst"] == {"peak": GIB, "largest": 12}


def test_experts_have_settings(tmp_path: Path, steps: Any) -> None:
    folder = written(tmp_path, LLAMA_1B)
    words = ("experts_implementation=eager", "target_parameters=experts.down_proj")
    plan_command(asked(folder, *words, "router_aux_loss_coef=0", "target_modules=linear-layers"))
    [(step, _)] = steps
    assert step.experts_implementation == "eager" and step.router_aux_loss_coef == 0
    assert (
        step.target_parameters == ["experts.down_proj"] and step.target_modules == "linear-layers"
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["batch_size=4"], "'batch_size=4' is not a setting of this step. Write one of "),
        (["lora_rank"], "'lora_rank' is not an override"),
        (["trainer=DPOTrainer"], "'trainer=DPOTrainer' is not a setting of this step"),
        (["--method", "qlora", "fsdp=true", "optim=adamw_8bit"], "that FSDP2 has sharded"),
        (["--fastest"], "--fastest: True is not for this step"),
        (["--trainer", "GRPOTrainer", "--tokens", "5M"], "--tokens: '5M' is not for this step"),
        (["--trainer", "RLOOTrainer", "--power", "300W"], "--power: '300W' is not for this step"),
        (["--compare", "h100-80gb,nothing"], "--compare: 'nothing' "),
    ],
)
def test_what_cannot_be_answered(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_command(asked(written(tmp_path, LLAMA_1B), *words)) == 2
    assert complaint in capsys.readouterr().err


def test_a_model_alone_is_trained_by_sft_trainer(
    tmp_path: Path, steps: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--hf", str(written(tmp_path, LLAMA_1B)), "--method", "lora", "--gpu", "4090"]
    assert plan_command(parsed(parser, words)) == 0
    [(step, device)] = steps
    assert step.trainer == "SFTTrainer" and step.lora and device["gpu"] == "rtx4090-24gb"
    assert "SFTTrainer on 1 rtx4090-24gb, rows of 1024 tokens" in capsys.readouterr().out


def test_it_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert plan_command(parsed(parser, ["tiny/full", "--trainer", "SFTTrainer"])) == 2
    assert "--trainer: 'SFTTrainer' is for --hf" in capsys.readouterr().err
    assert plan_command(parsed(parser, ["--hf", "/no", "--trainer", "SFTTrainer"])) == 2
    assert "has no config.json that can be read" in capsys.readouterr().err
