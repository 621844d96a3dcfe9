"""Estimates of configs: near traced peaks, from shapes that are those of the models, and without torch."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torchtune import config

from tests.helpers.benchmarks import benchmark
from torchtune_adaptive.planner import estimate
from torchtune_adaptive.recipe.plan.estimate import _decoder, estimated
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.registry import load_config, with_overrides

ROOT = Path(__file__).parents[2]
MADE = runpy.run_path(str(ROOT / "docs" / "make" / "decoders.py"))
COMPARED = benchmark("estimate")
SHAPES = json.loads((ROOT / "torchtune_adaptive" / "recipe" / "plan" / "decoders.json").read_text())
LORA = "llama3_2/1B_lora_single_device"


def peak(name: str, *overrides: str) -> Any:
    cfg = with_overrides(load_config(name), overrides)
    return estimated(plan_request(cfg, 1, "h100", length=2048))


@pytest.mark.parametrize("name", ["llama3_2.llama3_2_1b", "gemma2.lora_gemma2_2b"])
def test_the_shape_of_a_model(name: str) -> None:
    builder = f"torchtune.models.{name}"
    assert asdict(MADE["decoder_of"](builder)) == SHAPES[builder]


@pytest.mark.exhaustive
def test_shapes_are_those_of_the_models() -> None:
    assert MADE["table"]() == SHAPES, (
        "run: python docs/make/decoders.py > torchtune_adaptive/recipe/plan/decoders.json"
    )


@pytest.mark.exhaustive
def test_every_decoder_that_configs_train_is_known() -> None:
    plans = [plan for plan in COMPARED["plans"]() if plan.asked.kind.name in ("full", "lora")]
    unknown = {plan.cfg.model._component_ for plan in plans if not _decoder(plan.cfg.model)}
    assert all("vision" in one for one in unknown) and len(plans) > 90


ANY_SIZE = {"vocab_size": 96, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64}
ANY_SIZE |= {"intermediate_dim": 80, "max_seq_len": 128}
ADAPTERS = {"lora_attn_modules": ["q_proj"], "lora_rank": 2, "lora_alpha": 4}


@pytest.mark.parametrize("adapters", [{}, ADAPTERS], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama3_1.{}llama3_1", {}),
        ("mistral.{}mistral", {}),
        ("qwen2.{}qwen2", {"tie_word_embeddings": True}),
        ("gemma.{}gemma", {"head_dim": 32}),
    ],
)
def test_arguments_of_builders_say_the_shape(
    name: str, more: dict[str, Any], adapters: dict[str, Any]
) -> None:
    builder = f"torchtune.models.{name.format('lora_' if adapters else '')}"
    model = OmegaConf.create({"_component_": builder, **ANY_SIZE, **more, **adapters})
    with torch.device("meta"):
        built = MADE["shape_of"](config.instantiate(model))
    assert built is not None and _decoder(model) == built


@pytest.mark.exhaustive
def test_estimates_are_as_near_to_traces_as_is_said() -> None:
    errors = COMPARED["errors"]()
    near = [abs(error) <= estimate.ERROR for error in errors]
    assert len(errors) > 100 and sum(near) >= 0.9 * len(near)


def test_an_estimate_is_near_to_a_trace() -> None:
    for name, ranks in (("llama3_2/1B_full", 8), ("llama3_1/8B_qlora_single_device", 1)):
        for traced in COMPARED["answers"]()[name]:
            plan = plan_request(
                load_config(name), ranks, COMPARED["GPU"], length=COMPARED["LENGTH"]
            )
            about = estimated(plan, traced["rows"])
            assert about is not None
            assert about.reserved == pytest.approx(traced["reserved"], rel=estimate.ERROR)


def test_what_no_formula_is_for_has_no_estimate() -> None:
    assert peak(LORA) is not None
    for override in (
        "compile=True",
        "dtype=fp32",
        "dataset.packed=True",
        "model.use_dora=True",
        "loss._component_=torch.nn.CrossEntropyLoss",
        "optimizer._component_=torch.optim.SGD",
        "adaptive_batching.recompute_loss=True",
    ):
        assert peak(LORA, override) is None, override
    assert peak("llama3_1/8B_lora_dpo_single_device") is None


def test_settings_change_the_estimate() -> None:
    usual = peak(LORA).reserved
    for override in (
        "enable_activation_checkpointing=True",
        "batch_size=1",
        "model.apply_lora_to_mlp=False",
        "model.quantize_base=True",
    ):
        assert peak(LORA, override).reserved < usual, override
    checkpointed = peak(LORA, "enable_activation_checkpointing=True", "batch_size=64").reserved
    both = ("enable_activation_checkpointing=True", "enable_activation_offloading=True")
    assert peak(LORA, *both, "batch_size=64").reserved < checkpointed
    for override in ("model.lora_dropout=0.1", "model.lora_rank=512", "loss.num_output_chunks=1"):
        assert peak(LORA, override).reserved > usual, override


def test_an_estimate_imports_no_torch() -> None:
    program = f"""
import sys
from torchtune_adaptive.cli import plan_command, plan_options
plan = plan_command.plan_request(plan_command.load_config({LORA!r}), 1)
line = plan_command.estimate_line(plan.device, plan_command.estimated(plan).reserved, 0.05, "2 rows")
assert line.startswith("Estimate by")
assert not {{"torch", "torchtune"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
